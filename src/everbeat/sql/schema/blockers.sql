-- Return the sessions that a session is waiting for, and the table whose lock it wants. The table is null if the session is waiting for the
-- end of their transactions. Return no row if the session is not waiting for any other session.
select
    (
        select c.relname from pg_locks l join pg_class c on c.oid = l.relation where l.pid = %(pid)s and not l.granted limit 1
    ) as wanted,
    nullif(b.pid, 0) as pid, nullif(a.application_name, '') as session, a.usename::text as role, a.state, a.wait_event, a.xact_start,
    coalesce(a.backend_type = 'autovacuum worker', false) as is_vacuum
from unnest(pg_blocking_pids(%(pid)s)) b (pid)
left join pg_stat_activity a on a.pid = b.pid
order by a.xact_start
