-- Find the problems of limits for the doctor. The statement reads the lines of fragment/waiting_lines.
-- The kind "undeclared" is a gate in use without a limit. The kind "set" is a limit that an operator set more than `set_ms` ago, without an
-- end. The kind "cost" is waiting tasks that need more permits than the `bounds` of their limit. The kind "changes" counts the noted changes that are
-- not applied yet.
with {fragment/waiting_lines}
(
    select 'undeclared' as kind, u.gate as name, null::text as other, count(*) as number, null::text[] as bounds
    from (
        select distinct g.gate from line l cross join lateral unnest(l.gates) as g (gate)
        union
        select g.gate from {schema}.gates g where g.held > 0
    ) u
    where not exists (select from {schema}.limits m where m.name = split_part(u.gate, '/', 1))
    group by u.gate
    order by u.gate
    limit %(limit)s
)
union all
(
    select 'set', l.name, l.reason, floor(extract(epoch from statement_timestamp() - l.set_at) * 1000)::bigint, null
    from {schema}.limits l
    where l.set_by is not null and l.until is null and l.set_at < statement_timestamp() - %(set_ms)s * interval '1 millisecond'
    order by l.set_at
    limit %(limit)s
)
union all
(
    select 'cost', u.gate, l.name, max(l.costs[u.place]), array_remove(array[
        case when max(l.costs[u.place]) > m.concurrency then 'concurrency' end,
        case when not m.sliding and m.starts is not null and max(l.costs[u.place]) > m.burst then 'burst' end,
        case when m.sliding and max(l.costs[u.place]) > m.starts then 'rate' end
    ], null)
    from line l
    cross join lateral unnest(l.gates) with ordinality as u (gate, place)
    join {schema}.limits m on m.name = split_part(u.gate, '/', 1)
    where l.costs is not null and m.concurrency is distinct from 0
      and l.costs[u.place] > least(m.concurrency, case when m.sliding then m.starts when m.starts is not null then m.burst end)
    group by u.gate, l.name, m.name
    order by u.gate
    limit %(limit)s
)
union all
select 'changes', null, null, count(*), null from (select from {schema}.line_changes limit 10001) c
