-- Cancel the waiting tasks of these lines for which their limits have no room. If a limit keeps the newest task, that one stays. A limit that
-- drops tasks has no room if its permits are in use; a rate alone drops none. A task that has run before keeps waiting. A task that is not due
-- yet is judged when it is due.
create or replace function {schema}.cancel_surplus(p_lines text[], p_channel text) returns void language plpgsql
    set enable_seqscan = off set enable_mergejoin = off set enable_hashjoin = off set plan_cache_mode = force_generic_plan as $$
declare
    now double precision := extract(epoch from statement_timestamp());
    dropped uuid[];
    older uuid[];
begin
    with bounded as materialized (
        select l.line, l.floor, m.when_full,
            min(
                case m.when_full when 'drop' then greatest(0, m.concurrency - g.held) else {schema}.limit_room(g, m, now) end
                / greatest(1, l.costs[array_position(l.gates, g.gate)])
            ) as room
        from {schema}.lines l
        cross join lateral unnest(l.gates) as u (gate)
        join {schema}.gates g on g.gate = u.gate
        join {schema}.limits m on m.name = g.limit_name and m.when_full in ('drop', 'newest')
        where l.line = any(p_lines) and not l.is_strict
        group by l.line, l.floor, m.when_full
    ), surplus as materialized (
        select o.id, b.when_full
        from bounded b
        cross join lateral (
            select t.id, t.attempt, lead(t.id) over (order by t.serial_at, t.id) is not null as has_newer
            from {schema}.tasks t
            where t.serial = b.line and t.state = 'PENDING' and t.serial_at >= b.floor and t.enqueued_at <= statement_timestamp()
            order by t.serial_at, t.id offset b.room limit 1000
        ) o
        where b.room is not null and o.attempt = 0 and (b.when_full = 'drop' or o.has_newer)
    )
    select array_agg(s.id) filter (where s.when_full = 'drop'), array_agg(s.id) filter (where s.when_full = 'newest') into dropped, older
    from surplus s;
    perform {schema}.cancel_waiting(dropped, 'cancelled because its limit was full when it would have had to wait', p_channel);
    perform {schema}.cancel_waiting(older, 'cancelled because its limit was full and a newer task with the same key was waiting', p_channel);
end
$$
