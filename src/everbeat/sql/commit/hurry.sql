-- From here to its end a transaction on a user's connection may not idle for long: it holds the task's row, and a process that stands
-- still between the outcome and that end would hold it against every recovery. A shorter limit of the user's stands.
select set_config(
    'idle_in_transaction_session_timeout',
    case when s.setting::integer between 1 and %(most_ms)s::integer then s.setting else (%(most_ms)s::integer)::text end,
    true
) as limit_ms
from pg_settings s where s.name = 'idle_in_transaction_session_timeout'
