-- Whether this session must wait for its earlier backends, and which of these wait for their client. It waits for a backend that waits for
-- a synchronous standby: a repeated statement would wait as well. It also waits while two earlier backends are left for any reason.
-- As the role that logged in, as in at_work: another one does not see what these backends do.
with login as materialized (
    select set_config('role', 'none', true) as role
)
select coalesce(bool_or(a.wait_event = 'SyncRep'), false) or count(*) > 1 as must_wait,
    array_agg(a.pid) filter (where a.wait_event_type = 'Client') as idle
from login
cross join lateral pg_stat_get_activity(nullif(login.role, 'none')::integer) a
where a.application_name = current_setting('application_name') and a.pid <> pg_backend_pid()
  and a.usesysid = (select r.oid from pg_roles r where r.rolname = session_user)
  and a.datid = (select d.oid from pg_database d where d.datname = current_database())
