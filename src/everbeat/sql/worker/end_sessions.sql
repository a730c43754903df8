-- Close the given remaining sessions, except those that have been active since they were listed. The statement runs as the login role, as
-- in inspect/read_session_activity: another role is not allowed to close them.
with login as materialized (
    select set_config('role', 'none', true) as role
)
select a.pid, pg_terminate_backend(a.pid)
from login
cross join unnest(%(pids)s::integer[], %(since)s::timestamptz[], %(are_left)s::boolean[]) as found (pid, since, is_left)
cross join lateral pg_stat_get_activity(coalesce(nullif(login.role, 'none')::integer, found.pid)) a
where greatest(a.backend_start, a.xact_start, a.query_start) = found.since
  and case when found.is_left then a.wait_event_type = 'Client' else a.wait_event = 'ClientWrite' or (a.state = 'active' and a.wait_event = 'ClientRead') end
