-- What the server does for a session that is silent: whether it works, and whether it waits for a synchronous standby, itself or by a lock.
-- Behind a transaction pooler the session is one of those of its name.
select
    coalesce(bool_or(a.state not like 'idle%%'), false),
    coalesce(bool_or(a.wait_event = 'SyncRep' or (a.wait_event_type = 'Lock' and exists (
        select from pg_stat_activity b
        where b.datid = a.datid and b.wait_event = 'SyncRep' and b.state_change < clock_timestamp() - interval '1 s'
    ))), false)
from pg_stat_activity a
where a.pid <> pg_backend_pid() and a.usename = session_user and (
    a.pid = %(pid)s or (%(pid)s = 0 and a.application_name = %(name)s)
)
