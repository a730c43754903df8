-- Return what the server is doing for a silent session: whether the session is working, and whether it is waiting for a synchronous
-- standby. A session that is waiting for a lock also counts if another session has been waiting for the standby. Behind a transaction
-- pooler, the session is one of the sessions with its name. The query runs as the login role until the end of this statement. After "alter
-- role ... set role", the current role is a different one, from which PostgreSQL hides the sessions of the login role. A session whose
-- activity is unknown counts as working.
with login as materialized (
    select set_config('role', 'none', true) as role
)
select
    coalesce(bool_or((a.state like 'idle%%') is not true), false),
    coalesce(bool_or(a.wait_event = 'SyncRep' or (a.wait_event_type = 'Lock' and exists (
        select from pg_stat_activity b
        where b.datid = a.datid and b.wait_event = 'SyncRep' and b.state_change < clock_timestamp() - interval '1 s'
    ))), false)
from login
cross join lateral pg_stat_get_activity(nullif(login.role, 'none')::integer) a
where a.pid <> pg_backend_pid() and a.usesysid = (select r.oid from pg_roles r where r.rolname = session_user) and (
    a.pid = %(pid)s or (%(pid)s = 0 and a.application_name = %(name)s)
)
