-- Return limits in the order of their names, with the permits in use, the gates in use, and the waiting tasks. Permits are counted by
-- leases. Of each line, at most 1,001 waiting tasks are counted. `name`: only this limit. `at_least`: not all lines were read.
-- Of the gates of a limit, `most_lines` are searched for closed ones, in the order of an index (gates_by_version).
with lease as materialized (
    select split_part(u.gate, '/', 1) as name, u.gate, coalesce(t.costs[u.place], 1) as cost
    from {schema}.tasks t
    cross join lateral unnest(t.gates) with ordinality as u (gate, place)
    where t.state in ('CLAIMED', 'RUNNING') and t.gates is not null
), {fragment/waiting_lines}, waiting as materialized (
    select split_part(u.gate, '/', 1) as name, u.gate, n.tasks
    {fragment/from_waiting_lines}
)
select
    l.name, l.concurrency, l.starts, l.period_s, l.burst, l.sliding, l.fair, l.weights::text as weights, l.when_full, l.declared::text as declared,
    l.declared_by, l.declared_at, l.set_by, l.set_at, l.reason, l.until,
    (select coalesce(sum(e.cost), 0) from lease e where e.name = l.name)::bigint as held,
    (select coalesce(sum(w.tasks), 0) from waiting w where w.name = l.name)::bigint as waiting,
    (
        select count(*) from (
            select e.gate from lease e where e.name = l.name union select w.gate from waiting w where w.name = l.name and w.tasks > 0
        ) used
    ) as keys,
    (
        select to_timestamp(max(g.closed_until))
        from (select x.closed_until from {schema}.gates x where x.limit_name = l.name order by x.version limit %(most_lines)s) g
        where g.closed_until > extract(epoch from statement_timestamp())
    ) as closed_until,
    (select count(*) from line) >= %(most_lines)s as at_least
from {schema}.limits l
where %(name)s::text is null or l.name = %(name)s::text
order by l.name
