-- Return the gates of some limits in use: those with permits in use, waiting tasks or a time until which they are closed. Of each limit, those with
-- most waiting tasks come first, at most `limit` of them. The lines are read once for all limits. Of each line, at most 1,001 waiting tasks are
-- counted. Of the gates of a limit, `most_lines` are searched for closed ones, in the order of an index (gates_by_version).
with lease as materialized (
    select u.gate, sum(coalesce(t.costs[u.place], 1)) as held
    from {schema}.tasks t
    cross join lateral unnest(t.gates) with ordinality as u (gate, place)
    where t.state in ('CLAIMED', 'RUNNING') and t.gates is not null and split_part(u.gate, '/', 1) = any(%(names)s::text[])
    group by u.gate
), {fragment/waiting_lines}, waiting as materialized (
    select u.gate, sum(n.tasks) as tasks
    {fragment/from_waiting_lines}
    where split_part(u.gate, '/', 1) = any(%(names)s::text[])
    group by u.gate
), used as (
    select e.gate from lease e
    union
    select w.gate from waiting w where w.tasks > 0
    union
    select g.gate
    from unnest(%(names)s::text[]) m (name)
    cross join lateral (
        select x.gate, x.closed_until from {schema}.gates x where x.limit_name = m.name order by x.version limit %(most_lines)s
    ) g
    where g.closed_until > extract(epoch from statement_timestamp())
), ranked as materialized (
    select
        split_part(u.gate, '/', 1) as name, u.gate, coalesce(e.held, 0)::bigint as held, coalesce(w.tasks, 0)::bigint as waiting,
        row_number() over (
            partition by split_part(u.gate, '/', 1) order by coalesce(w.tasks, 0) desc, coalesce(e.held, 0) desc, u.gate
        ) as place
    from used u
    left join lease e on e.gate = u.gate
    left join waiting w on w.gate = u.gate
)
select
    r.name, r.gate, r.held, r.waiting,
    case when g.closed_until > extract(epoch from statement_timestamp()) then to_timestamp(g.closed_until) end as closed_until,
    case when g.opens_at > statement_timestamp() then g.opens_at end as opens_at
from ranked r
left join {schema}.gates g on g.gate = r.gate
where r.place <= %(limit)s
order by r.name, r.place
