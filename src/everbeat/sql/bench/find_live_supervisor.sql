-- Return whether any supervisor registered in this schema holds its session lock.
select exists (
    select from {schema}.supervisors s
    join pg_locks l
      on l.locktype = 'advisory' and l.granted and l.objsubid = 1
     and l.database = (select oid from pg_database where datname = current_database())
     and l.classid::bigint = ((s.lock_key >> 32) & 4294967295) and l.objid::bigint = (s.lock_key & 4294967295)
)
