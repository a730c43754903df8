-- Return limits in the order of their names, with the permits in use, the gates in use, and the waiting tasks. Permits are counted by
-- leases. Of each line, at most 1,001 waiting tasks are counted. `name`: only this limit. `at_least`: not all lines were read. The counts are
-- added up once for all limits. Of the gates of a limit, `most_lines` are searched for closed ones, in the order of an index
-- (gates_by_version).
with {fragment/waiting_lines}, gate_in_use as materialized (
    select u.gate, sum(u.held) as held, sum(u.waiting) as waiting, bool_or(u.is_used) as is_used
    from (
        select x.gate, coalesce(t.costs[x.place], 1)::bigint as held, 0::bigint as waiting, true as is_used
        from {schema}.tasks t
        cross join lateral unnest(t.gates) with ordinality as x (gate, place)
        where t.state in ('CLAIMED', 'RUNNING') and t.gates is not null
        union all
        select u.gate, 0, n.tasks, n.tasks > 0
        {fragment/from_waiting_lines}
    ) u
    group by u.gate
), in_use as materialized (
    select
        split_part(g.gate, '/', 1) as name, sum(g.held)::bigint as held, sum(g.waiting)::bigint as waiting, count(*) filter (where g.is_used) as keys
    from gate_in_use g
    group by 1
)
select
    l.name, l.concurrency, l.starts, l.period_s, l.burst, l.sliding, l.fair, l.weights::text as weights, l.when_full, l.declared::text as declared,
    l.declared_by, l.declared_at, l.set_by, l.set_at, l.reason, l.until, coalesce(i.held, 0) as held, coalesce(i.waiting, 0) as waiting,
    coalesce(i.keys, 0) as keys,
    (
        select to_timestamp(max(g.closed_until))
        from (select x.closed_until from {schema}.gates x where x.limit_name = l.name order by x.version limit %(most_lines)s) g
        where g.closed_until > extract(epoch from statement_timestamp())
    ) as closed_until,
    (select count(*) from line) >= %(most_lines)s as at_least
from {schema}.limits l
left join in_use i on i.name = l.name
where %(name)s::text is null or l.name = %(name)s::text
order by l.name
