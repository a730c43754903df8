-- Let as many lines continue as these gates have room for, in the order in which they wait, and record when the rates open next. The caller
-- must hold the locks of the gates. Therefore, no gate fills up in the meantime, and no line starts to wait unseen. If the first waiting
-- line needs more permits than are free, the gate is reserved for it. Workers are notified of lines that the caller cannot serve.
create function {schema}.unpark_lines(p_gates text[], p_readers text[], p_queues text[], p_channel text) returns void language plpgsql
    set enable_seqscan = off set enable_mergejoin = off set enable_hashjoin = off set plan_cache_mode = force_generic_plan as $$
declare
    now double precision := extract(epoch from clock_timestamp());
    unparked text[];
begin
    with candidate as materialized (
        select g.gate, x.line, x.room, sum(x.cost) over (partition by g.gate order by x.place rows unbounded preceding) as needed
        from {schema}.gates g
        left join {schema}.limits m on m.name = g.limit_name
        cross join lateral (select coalesce({schema}.limit_room(g, m, now), 1000) as room) r
        cross join lateral (
            select l.line, r.room, greatest(1, l.costs[array_position(l.gates, g.gate)]) as cost,
                row_number() over (order by l.priority, l.turn) as place
            from (
                select * from {schema}.lines o where o.state = 'B' and o.blocked = g.gate order by o.priority, o.turn
                limit r.room for no key update skip locked
            ) l
        ) x
        where g.gate = any(p_gates)
    ), freed as (
        update {schema}.lines l set state = 'R', blocked = null, turn = clock_timestamp()
        from candidate c
        where l.line = c.line and c.needed <= c.room
        returning l.queue, l.reader
    )
    select array_agg(distinct f.queue) filter (where f.reader <> all(p_readers) or (p_queues is not null and f.queue <> all(p_queues)))
    into unparked
    from freed f;
    update {schema}.gates g
    set reserved = next_line.cost > 1 and next_line.cost > coalesce({schema}.limit_room(g, next_line.bound, now), 1000),
        -- A gate that has room for the line opens soon after, in case the lines that continue do not use the room.
        opens_at = greatest({schema}.gate_opens_at(g, next_line.bound, next_line.cost), statement_timestamp() + interval '50 milliseconds')
    from unnest(p_gates) as asked (gate)
    cross join lateral (
        select coalesce(b.cost, 0) as cost, m as bound
        from {schema}.gates o
        left join {schema}.limits m on m.name = o.limit_name
        left join lateral (
            select greatest(1, l.costs[array_position(l.gates, o.gate)]) as cost
            from {schema}.lines l where l.state = 'B' and l.blocked = o.gate order by l.priority, l.turn limit 1
        ) b on true
        where o.gate = asked.gate
    ) next_line
    where g.gate = asked.gate and next_line.cost > 0;
    update {schema}.gates g set reserved = false, opens_at = null
    where g.gate = any(p_gates) and (g.reserved or g.opens_at is not null)
      and not exists (select from {schema}.lines l where l.state = 'B' and l.blocked = g.gate);
    if unparked is not null and p_channel is not null then
        perform pg_notify(p_channel, 't:' || left(u, 1000)) from unnest(unparked) u where (select pg_notification_queue_usage()) < 0.5;
    end if;
end
$$
