-- Limit how long the rest of a transaction on a user's connection can be idle. The transaction has locked the task's row, so a process that
-- freezes after writing the outcome would block every recovery. If the user has set a shorter limit, that limit is kept.
select set_config(
    'idle_in_transaction_session_timeout',
    case when s.setting::integer between 1 and %(most_ms)s::integer then s.setting else (%(most_ms)s::integer)::text end,
    true
) as limit_ms
from pg_settings s where s.name = 'idle_in_transaction_session_timeout'
