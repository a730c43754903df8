-- Return the gates of a PENDING task, in its own order, with the numbers in force and the permits in use. `keys_before` counts the fair lines
-- that have an earlier turn. `closed_by` is a waiting task of the same line that closed
-- the gate. `most` is the largest number of permits that the limit can ever give to one task. `before` counts earlier tasks of the same line. Counts stop at 1,001. The holders are those with the oldest leases.
with mine as materialized (
    select t.id, t.serial, t.serial_at, t.gates, t.costs from {schema}.tasks t where t.id = %(id)s and t.state = 'PENDING' and t.gates is not null
), gate as materialized (
    select u.gate, u.place, coalesce(m.costs[u.place], 1) as cost, split_part(u.gate, '/', 1) as limit_name
    from mine m cross join lateral unnest(m.gates) with ordinality as u (gate, place)
), holder as materialized (
    select g.gate, t.id, t.state, coalesce(t.costs[array_position(t.gates, g.gate)], 1) as cost, t.claimed_at, w.id as worker_id,
        greatest(s.last_beat_at, w.last_beat_at) as last_beat_at
    from gate g
    join {schema}.tasks t on t.state in ('CLAIMED', 'RUNNING') and t.gates @> array[g.gate]
    left join {schema}.workers w on w.id = t.claimed_by_worker_id
    left join {schema}.supervisors s on s.id = w.supervisor_id
), place as materialized (
    select l.line, l.state, l.blocked, l.fair, l.turn, l.suspect, l.reader, l.queue, l.priority from mine m join {schema}.lines l on l.line = m.serial
)
select
    g.gate, g.cost, l.name is not null as is_declared, l.concurrency, l.starts, l.period_s, l.set_by, l.set_at, l.reason, l.until, l.fair,
    least(l.concurrency, case when l.sliding then l.starts when l.starts is not null then l.burst end) as most,
    (select coalesce(sum(h.cost), 0) from holder h where h.gate = g.gate)::bigint as held,
    case when n.closed_until > extract(epoch from statement_timestamp()) then to_timestamp(n.closed_until) end as closed_until,
    (
        select c.id from mine m
        cross join lateral (
            select t.id, t.error from {schema}.tasks t where t.serial = m.serial and t.state = 'PENDING' order by t.serial_at desc, t.id desc limit 1001
        ) c
        where n.closed_until > extract(epoch from statement_timestamp()) and {schema}.object_of(c.error) ->> 'code' = 'RATE_LIMITED'
        limit 1
    ) as closed_by,
    -- The time at which the rate alone opens the gate, as if no permit was in use and no task had closed it.
    case when l.starts is not null then (
        select f.at from (
            select to_timestamp(nullif(case
                when l.sliding then n.recent[cardinality(n.recent) - l.starts + g.cost] + l.period_s
                else n.next_at - (l.burst - g.cost) * (l.period_s / l.starts)
            end, 'NaN')) as at
        ) f
        where f.at > statement_timestamp()
    ) end as rate_opens_at,
    (
        select count(*) from (
            select from mine m join {schema}.tasks t on t.serial = m.serial and t.state = 'PENDING'
            where (t.serial_at, t.id) < (m.serial_at, m.id) limit 1001
        ) earlier
    ) as before,
    case when p.fair then (
        select count(*) from (
            select from {schema}.lines o
            where o.fair and o.state = p.state and (o.turn, o.line) < (p.turn, p.line) and (
                p.state = 'R' and o.suspect = p.suspect and o.reader = p.reader and o.queue = p.queue and o.priority = p.priority
                or p.state = 'B' and o.blocked = p.blocked and o.priority = p.priority
            )
            limit 1001
        ) ahead
    ) else 0 end as keys_before,
    (
        select coalesce(json_agg(json_build_object(
            'task_id', h.id, 'state', h.state, 'worker_id', h.worker_id, 'last_beat_at', h.last_beat_at, 'claimed_at', h.claimed_at
        ) order by h.claimed_at), '[]')::text
        from (select * from holder h where h.gate = g.gate order by h.claimed_at limit 5) h
    ) as holders,
    (select count(*) from holder h where h.gate = g.gate) as holder_count
from gate g
left join {schema}.limits l on l.name = g.limit_name
left join {schema}.gates n on n.gate = g.gate
left join place p on true
order by g.place
