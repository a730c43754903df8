-- Return whether the build of an index has finished; no row if the index does not exist.
select i.indisvalid
from pg_index i
join pg_class c on c.oid = i.indexrelid
join pg_namespace n on n.oid = c.relnamespace
where n.nspname = %(schema)s and c.relname = %(index)s
