-- Set the limits of a session that runs an upgrade. The role's time limits do not end the build of an index, but a wait for a lock is
-- limited. The server ends the session after a minute of inactivity, because its process is then frozen and others are waiting for its
-- lock. Return the milliseconds after which a wait for a lock cancels an autovacuum.
select
    set_config(s.name, case s.name when 'lock_timeout' then %(wait_ms)s::text when 'idle_session_timeout' then '60s' else '0' end, false),
    (select d.setting::integer from pg_settings d where d.name = 'deadlock_timeout') as deadlock_ms
from pg_settings s
where s.name in ('statement_timeout', 'transaction_timeout', 'lock_timeout', 'idle_session_timeout')
