-- Ends earlier backends of this session that wait for their client. One that waits for a standby is never among them: to end it would show
-- what the standby might lose. As the role that logged in, as in at_work: another one is not allowed to end them.
with login as materialized (
    select set_config('role', 'none', true) as role
)
select pg_terminate_backend(l.pid)
from login
cross join unnest(%(pids)s::integer[]) l (pid)
