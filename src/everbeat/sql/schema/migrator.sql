-- Return the session that holds the migration lock.
select nullif(l.pid, 0) as pid, nullif(a.application_name, '') as session, a.usename::text as role, a.state, a.wait_event, a.backend_start
from pg_locks l
left join pg_stat_activity a on a.pid = l.pid
where l.locktype = 'advisory' and l.granted and l.objsubid = 1
    and l.database = (select d.oid from pg_database d where d.datname = current_database())
    and (l.classid::bigint << 32 | l.objid::bigint) = %(lock_key)s
