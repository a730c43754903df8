-- List indexes of the schema whose build did not finish. Indexes of tables on which a session is currently building an index are left out.
-- So are indexes of partitioned tables, which can be made for the partitions to come only.
select c.relname
from pg_index i
join pg_class c on c.oid = i.indexrelid
join pg_namespace n on n.oid = c.relnamespace
where n.nspname = %(schema)s and c.relkind = 'i' and not i.indisvalid and not exists (
    select from pg_locks l
    where l.relation = i.indrelid and l.mode = 'ShareUpdateExclusiveLock' and l.granted
        and l.database = (select d.oid from pg_database d where d.datname = current_database())
)
order by 1
