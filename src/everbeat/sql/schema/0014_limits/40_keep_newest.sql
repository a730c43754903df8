-- Cancel the waiting tasks of these lines that have never run, except the newest task, if their gates are full.
create function {schema}.keep_newest(p_lines text[], p_channel text) returns void language plpgsql
    set enable_seqscan = off set enable_mergejoin = off set enable_hashjoin = off set plan_cache_mode = force_generic_plan as $$
declare
    ids uuid[];
    now double precision := extract(epoch from statement_timestamp());
begin
    with older as materialized (
        select o.id
        from {schema}.lines l
        cross join lateral (
            select t.id, t.attempt from {schema}.tasks t where t.serial = l.line and t.state = 'PENDING' and t.serial_at >= l.floor
            order by t.serial_at desc, t.id desc offset 1 limit 1000
        ) o
        where l.line = any(p_lines) and o.attempt = 0 and exists (
            select from {schema}.gates g join {schema}.limits m on m.name = g.limit_name
            where g.gate = any(l.gates) and m.when_full = 'newest'
              and {schema}.limit_room(g, m, now) < greatest(1, l.costs[array_position(l.gates, g.gate)])
        )
    )
    select array_agg(o.id) into ids from older o;
    perform {schema}.cancel_waiting(ids, 'cancelled because its limit was full and a newer task with the same key was waiting', p_channel);
end
$$
