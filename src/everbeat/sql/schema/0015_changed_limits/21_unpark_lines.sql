-- Let as many lines continue as these gates have room for, in the order in which they wait, and record when the gates open next. The caller
-- must hold the locks of the gates. Therefore, no gate fills up in the meantime, and no line starts to wait unseen. If the first waiting
-- line needs more permits than are free, the gate is reserved. Only that line and the lines that this function lets through can pass. A line that needs
-- more permits than its limit ever grants stays, and no line waits behind it. Workers are notified of lines that the caller cannot serve.
-- The version of the limit is read before the lines are judged, so a change in the meantime has a later version than the gate.
create or replace function {schema}.unpark_lines(p_gates text[], p_readers text[], p_queues text[], p_channel text) returns void language plpgsql
    set enable_seqscan = off set enable_mergejoin = off set enable_hashjoin = off set plan_cache_mode = force_generic_plan as $$
declare
    now double precision := extract(epoch from clock_timestamp());
    unparked text[]; passed jsonb;
begin
    -- The time of the next start was calculated with the numbers of that time. With the present numbers, it is at most a burst away.
    update {schema}.gates g
    set version = m.version,
        next_at = case when m.starts is null then g.next_at else least(g.next_at, now + m.burst * (m.period_s / m.starts)) end
    from {schema}.limits m
    where g.gate = any(p_gates) and m.name = g.limit_name and g.version < m.version;
    with candidate as materialized (
        select g.gate, x.line, x.cost, r.room, sum(x.cost) over (partition by g.gate order by x.place rows unbounded preceding) as needed
        from {schema}.gates g
        left join {schema}.limits m on m.name = g.limit_name
        cross join lateral (
            select coalesce({schema}.limit_room(g, m, now), 2147483647) as room,
                coalesce(least(m.concurrency, case when m.sliding then m.starts when m.starts is not null then m.burst end), 2147483647) as most
        ) r
        cross join lateral (
            select l.line, greatest(1, l.costs[array_position(l.gates, g.gate)]) as cost, row_number() over (order by l.priority, l.credit = 0, l.turn) as place
            from (
                select * from {schema}.lines o
                where o.state = 'B' and o.blocked = g.gate and greatest(1, o.costs[array_position(o.gates, g.gate)]) <= r.most
                order by o.priority, o.credit = 0, o.turn
                limit least(r.room, 1000) for no key update skip locked
            ) l
        ) x
        where g.gate = any(p_gates)
    ), freed as (
        -- `blocked` stays, because the reservation of this gate does not stop the line.
        update {schema}.lines l set state = 'R', turn = statement_timestamp()
        from candidate c
        where l.line = c.line and c.needed <= c.room
        returning l.queue, l.reader, c.gate, c.cost
    )
    select
        (
            select array_agg(distinct f.queue) from freed f
            where f.reader <> all(p_readers) or (p_queues is not null and f.queue <> all(p_queues))
        ),
        (select jsonb_object_agg(p.gate, p.units) from (select f.gate, sum(f.cost) as units from freed f group by f.gate) p)
    into unparked, passed;
    update {schema}.gates g
    set reserved = n.cost is not null and n.cost > 1 and n.cost > n.room - coalesce((passed ->> g.gate)::integer, 0),
        -- A gate opens by itself if the line waits for a time. It opens soon if the lines that continue might not use the room.
        opens_at = case when n.can_open then greatest(n.opens_at, statement_timestamp() + interval '50 milliseconds') end
    from unnest(p_gates) as asked (gate)
    cross join lateral (
        select b.cost, coalesce({schema}.limit_room(o, m, now), 2147483647) as room, {schema}.gate_opens_at(o, m, b.cost) as opens_at,
            b.cost is not null and (m.concurrency is null or o.held::bigint + b.cost <= m.concurrency) as can_open
        from {schema}.gates o
        left join {schema}.limits m on m.name = o.limit_name
        left join lateral (
            select greatest(1, l.costs[array_position(l.gates, o.gate)]) as cost
            from {schema}.lines l
            where l.state = 'B' and l.blocked = o.gate and greatest(1, l.costs[array_position(l.gates, o.gate)]) <= coalesce(
                least(m.concurrency, case when m.sliding then m.starts when m.starts is not null then m.burst end), 2147483647
            )
            order by l.priority, l.credit = 0, l.turn limit 1
        ) b on true
        where o.gate = asked.gate
    ) n
    where g.gate = asked.gate and (n.can_open or g.reserved or g.opens_at is not null or coalesce(n.cost, 0) > 1);
    if unparked is not null and p_channel is not null then
        perform pg_notify(p_channel, 't:' || left(u, 1000)) from unnest(unparked) u where (select pg_notification_queue_usage()) < 0.5;
    end if;
end
$$
