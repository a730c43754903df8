-- List the privileges on the schema's tables that this role lacks, with the number of tables for each. The row without a table stands for
-- the schema itself. The table of steps is left out, because only upgrades need it, and an upgrade creates it if it is missing.
select null as "table", array['USAGE'] as missing, 0::bigint as tables
where not has_schema_privilege(%(schema)s, 'USAGE')
union all
select
    c.relname, lacks.missing,
    (select count(*) from pg_class every where every.relnamespace = n.oid and every.relkind in ('r', 'p') and not every.relispartition and every.relname <> 'schema_steps') as tables
from pg_class c
join pg_namespace n on n.oid = c.relnamespace
cross join lateral (
    select array(
        select p from unnest(array['SELECT', 'INSERT', 'UPDATE', 'DELETE']) p where not has_table_privilege(c.oid, p)
    ) as missing
) lacks
where n.nspname = %(schema)s and c.relkind in ('r', 'p') and not c.relispartition and c.relname <> 'schema_steps' and lacks.missing <> '{{}}'
order by 1 nulls first
