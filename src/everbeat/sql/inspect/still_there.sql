-- Which of these sessions, on which a client has hung up, the server still has. As the role that logged in, as in at_work.
with login as materialized (
    select set_config('role', 'none', true) as role
)
select a.pid
from login
cross join lateral pg_stat_get_activity(nullif(login.role, 'none')::integer) a
where a.pid = any (%(pids)s) and a.usesysid = (select r.oid from pg_roles r where r.rolname = session_user)
  and (a.state like 'idle%%') is not true
