-- Cancel the waiting tasks of these lines that found room when they were sent, but would have to wait now, because their limit drops tasks.
-- A task that has run before keeps waiting. A task that is not due yet is judged when it is due.
create function {schema}.cancel_surplus(p_lines text[], p_channel text) returns void language plpgsql
    set enable_seqscan = off set enable_mergejoin = off set enable_hashjoin = off set plan_cache_mode = force_generic_plan as $$
declare
    ids uuid[];
    now double precision := extract(epoch from statement_timestamp());
begin
    with bounded as materialized (
        select l.line, l.floor, min({schema}.limit_room(g, m, now) / coalesce(l.costs[array_position(l.gates, g.gate)], 1)) as room
        from {schema}.lines l
        cross join lateral unnest(l.gates) as u (gate)
        join {schema}.gates g on g.gate = u.gate
        join {schema}.limits m on m.name = g.limit_name and m.when_full = 'drop'
        where l.line = any(p_lines) and not l.is_strict
        group by l.line, l.floor
    ), surplus as materialized (
        select o.id
        from bounded b
        cross join lateral (
            select t.id, t.attempt from {schema}.tasks t
            where t.serial = b.line and t.state = 'PENDING' and t.serial_at >= b.floor and t.enqueued_at <= statement_timestamp()
            order by t.serial_at, t.id offset b.room limit 1000
        ) o
        where b.room is not null and o.attempt = 0
    )
    select array_agg(o.id) into ids from surplus o;
    perform {schema}.cancel_waiting(ids, 'cancelled because its limit was full when it would have had to wait', p_channel);
end
$$
