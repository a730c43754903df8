-- Ends the earlier backends of this session that wait for their client, and returns whether the session must wait. It waits for a backend
-- that waits for a synchronous standby: a repeated statement would wait as well, and to end that backend would show what the standby
-- might lose. It also waits while two earlier backends are left for any reason.
-- As the role that logged in, as in at_work: another one neither sees what these backends do, nor is allowed to end them.
with login as materialized (
    select set_config('role', 'none', true) as role
)
select coalesce(bool_or(old.wait_event = 'SyncRep'), false) or count(*) > 1 as must_wait
from (
    select a.wait_event, case when a.wait_event_type = 'Client' then pg_terminate_backend(a.pid) end as ended
    from login
    cross join lateral pg_stat_get_activity(nullif(login.role, 'none')::integer) a
    where a.application_name = current_setting('application_name') and a.pid <> pg_backend_pid()
      and a.usesysid = (select r.oid from pg_roles r where r.rolname = session_user)
      and a.datid = (select d.oid from pg_database d where d.datname = current_database())
) old
