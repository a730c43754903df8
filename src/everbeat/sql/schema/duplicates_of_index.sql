-- Return the parts of a unique index as SQL: its table, its columns, and the condition on its rows (null: all rows).
select
    i.indrelid::regclass::text as "table",
    (select string_agg(pg_get_indexdef(i.indexrelid, k, true), ', ' order by k) from generate_series(1, i.indnkeyatts) k) as columns,
    pg_get_expr(i.indpred, i.indrelid, true) as predicate
from pg_index i
join pg_class c on c.oid = i.indexrelid
join pg_namespace n on n.oid = c.relnamespace
where n.nspname = %(schema)s and c.relname = %(index)s
