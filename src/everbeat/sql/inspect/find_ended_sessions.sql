-- Return which of the given sessions, closed by their client, no longer exist on the server. The statement runs as the login role, as in
-- inspect/read_session_activity.
with login as materialized (
    select set_config('role', 'none', true) as role
)
select l.pid
from login
cross join unnest(%(pids)s::integer[]) l (pid)
where not exists (
    select from pg_stat_get_activity(nullif(login.role, 'none')::integer) a
    where a.pid = l.pid and a.usesysid = (select r.oid from pg_roles r where r.rolname = session_user)
      and (a.state like 'idle%%') is not true
)
