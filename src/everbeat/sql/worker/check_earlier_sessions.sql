-- Return whether this session must wait for its earlier backends, and which of these are waiting for their client. The session must wait
-- for a backend that is waiting for a synchronous standby, because a repeated statement would also have to wait. The session must also wait
-- while two or more earlier backends remain for any reason. The statement runs as the login role, as in inspect/read_session_activity:
-- another role cannot see the state of these backends.
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
