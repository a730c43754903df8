-- Estimate how many tasks there are, and how many are in each state, by the last analyze of `tasks` and of each part of `history`. Only catalogs are
-- read. A rare state can be missing, and so can all of them before the first analyze. The row without a state is the number of all tasks.
with part as materialized (
    select n.nspname, c.relname, greatest(c.reltuples, 0)::float8 as tasks
    from (select 'tasks' as name union all select p.name from {schema}.history_parts p) p
    join pg_catalog.pg_namespace n on n.nspname = %(schema)s
    join pg_catalog.pg_class c on c.relnamespace = n.oid and c.relname = p.name
)
select null as state, round(sum(p.tasks))::bigint as tasks from part p
union all
select v.state, round(sum(p.tasks * v.share))::bigint
from part p
join pg_catalog.pg_stats s on s.schemaname = p.nspname and s.tablename = p.relname and s.attname = 'state' and not s.inherited
cross join lateral unnest(s.most_common_vals::text::text[], s.most_common_freqs) v (state, share)
group by v.state
order by state nulls first
