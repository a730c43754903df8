-- Terminate earlier backends of this session that are waiting for their client. None of them is waiting for a standby: terminating such a
-- backend would reveal a commit that the standby might lose. The statement runs as the login role, as in inspect/read_session_activity:
-- another role is not allowed to terminate them.
with login as materialized (
    select set_config('role', 'none', true) as role
)
select pg_terminate_backend(l.pid)
from login
cross join unnest(%(pids)s::integer[]) l (pid)
