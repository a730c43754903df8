-- The settings of a session that upgrades: no time limit of the role ends the build of an index, a wait for a lock has one (%(wait_ms)s),
-- and the server ends a session that was idle for a minute: its process is frozen, and others wait for the lock that it holds.
-- Also tells after how many milliseconds a wait for a lock cancels an autovacuum.
select
    set_config(s.name, case s.name when 'lock_timeout' then %(wait_ms)s::text when 'idle_session_timeout' then '60s' else '0' end, false),
    (select d.setting::integer from pg_settings d where d.name = 'deadlock_timeout') as deadlock_ms
from pg_settings s
where s.name in ('statement_timeout', 'transaction_timeout', 'lock_timeout', 'idle_session_timeout')
