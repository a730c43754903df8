-- Delete gates without holders and without waiting lines that have not been used for a day: one step of a scan of the primary key. A gate whose
-- rate or closure is still in force is kept. The next task with such a gate creates it anew. Return the position at which the next step
-- begins, or null at the end.
with looked as materialized (
    select g.gate from {schema}.gates g
    where g.gate > %(after)s
    order by g.gate
    limit %(limit)s
), idle as materialized (
    select k.gate
    from looked f
    cross join lateral (
        select g.gate from {schema}.gates g
        where g.gate = f.gate and g.held = 0 and g.used_at < statement_timestamp() - interval '1 day'
          and greatest(g.next_at, g.closed_until) < extract(epoch from statement_timestamp())
          and coalesce(g.recent[cardinality(g.recent)], 0) < extract(epoch from statement_timestamp())
              - greatest(86400, (select m.period_s from {schema}.limits m where m.name = g.limit_name))
        limit 1 for update skip locked
    ) k
    where not exists (select from {schema}.lines l where l.state = 'B' and l.blocked = f.gate)
), gone as (
    delete from {schema}.gates g where g.gate = any(array(select i.gate from idle i))
)
select
    case when (select count(*) from looked) = %(limit)s then (select max(gate) from looked) end as next_after
