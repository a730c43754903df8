-- Return the permits and starts of tasks that a claim was offered and did not take. The caller has locked the gates in the same statement,
-- so no other claim has counted on them. Return the gates.
create function {schema}.return_permits(
    p_gates text[], p_costs integer[], p_tasks integer, p_granted_at timestamptz
) returns text[] language plpgsql
    set enable_seqscan = off set enable_mergejoin = off set enable_hashjoin = off set plan_cache_mode = force_generic_plan as $$
declare
    v_now double precision := extract(epoch from p_granted_at);
begin
    update {schema}.gates g
    set held = greatest(0, g.held::bigint - u.units)::integer,
        next_at = case when m.starts is null or m.sliding then g.next_at else g.next_at - u.units * (m.period_s / m.starts) end,
        recent = case when m.sliding then (
            select array_agg(w.at order by w.at)
            from (select r.at, row_number() over (order by r.at = v_now desc) as place from unnest(g.recent) r (at)) w
            where w.place > u.units
        ) end
    from (
        select x.gate, greatest(1, p_costs[x.place])::bigint * p_tasks as units from unnest(p_gates) with ordinality as x (gate, place)
    ) u
    cross join lateral (select k.limit_name from {schema}.gates k where k.gate = u.gate) k
    left join {schema}.limits m on m.name = k.limit_name
    where g.gate = u.gate;
    return p_gates;
end
$$
