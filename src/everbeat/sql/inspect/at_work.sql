-- What the server does for a session that is silent: whether it works, and whether it waits for a synchronous standby, itself or by a lock.
-- Behind a transaction pooler the session is one of those of its name.
-- The look is made as the role that logged in, until the end of this statement: after "alter role ... set role" the current role is
-- another one, and PostgreSQL hides from it what the sessions of the first one do. A session of which nothing is known counts as at work.
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
