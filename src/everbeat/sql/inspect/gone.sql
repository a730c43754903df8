-- Which of these sessions, on which a client has hung up, the server does not have any more. As the role that logged in, as in at_work.
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
