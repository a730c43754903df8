-- Offer tasks of lines to a claim, and take their permits. The claim that calls this function leases the tasks in the same transaction. It
-- returns the permits of each task that it did not lease. So `held` of a gate is never less than the number of permits in use.
-- The function never waits for a lock. If another transaction has a lock that it needs, it adds a change, so that the line is read again.
-- `p_starts` is the number of tasks that the claim starts at once. Tasks with gates are only offered if they start at once.
-- `floors` contains the turn of the first ready line of each lane. The worker passes it to its next claims, for a second at most, as
-- `p_floors`. They do not read the entries before it, which the index keeps while any transaction has an old snapshot. A line can
-- become ready in a transaction that commits later, with an earlier turn. So a floor is a quarter of a second earlier than the line.
create or replace function {schema}.offer_lines(
    p_readers text[], p_queues text[], p_closed text[], p_queue_names text[], p_queue_priorities integer[], p_suspects boolean,
    p_most integer, p_starts integer, p_channel text, p_floors json
) returns table (
    place integer, id uuid, queue text, priority smallint, enqueued_at timestamptz, line text, gates text[], costs integer[], serial_at timestamptz,
    granted_at timestamptz, floors json
) language plpgsql
    set enable_seqscan = off set enable_mergejoin = off set enable_hashjoin = off set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
declare
    v_granted_at timestamptz; v_floors json; v_now double precision;
    v_lines text[]; v_offers {schema}.line_offer[]; v_one {schema}.line_offer; v_count integer; v_again text[]; v_loose text[];
    v_gates text[]; v_rooms integer[]; v_reserved boolean[]; v_places jsonb; v_place integer;
    v_page integer := p_most; v_want integer := p_most; v_starts integer := p_starts; v_quota integer; v_cost integer; v_more integer; v_gate integer;
    v_tids tid[]; v_limits text[]; v_active integer[]; v_next integer[]; i integer; v_waiting bigint[]; v_queues text[]; v_shares integer[];
    v_line_places bigint[]; v_ids uuid[]; v_due_ats timestamptz[]; v_serial_ats timestamptz[];
begin
    if p_most <= 0 or (p_floors is null and not exists (select from {schema}.lines where state = 'R')) then
        return;
    end if;
    loop
        with recursive known as materialized (
            select f.* from json_to_recordset(coalesce(p_floors, '[]')) as f (
                suspect boolean, is_gated boolean, reader text, queue text, priority smallint, turn timestamptz
            )
        ), lane (suspect, is_gated, reader, queue, priority, turn) as (
            select s.suspect, g.is_gated, r.reader, ''::text, (-32768)::smallint, '-infinity'::timestamptz
            from unnest(p_readers) as r (reader)
            cross join unnest(case when p_starts > 0 then array[false, true] else array[false] end) as g (is_gated)
            cross join unnest(case when p_suspects is null then array[false, true] else array[p_suspects] end) as s (suspect)
            union all
            select lane.suspect, lane.is_gated, lane.reader, next_lane.queue, next_lane.priority, next_lane.turn
            from lane
            left join lateral (
                select k.queue, k.priority, k.turn from known k
                where k.suspect = lane.suspect and k.is_gated = lane.is_gated and k.reader = lane.reader
                  and (k.queue, k.priority) > (lane.queue, lane.priority)
                order by k.queue, k.priority limit 1
            ) k on true
            cross join lateral (
                select found.*
                from (
                    select k.queue, k.priority, k.turn where k.queue is not null
                    union all
                    (
                        select l.queue, l.priority, '-infinity' from {schema}.lines l
                        where k.queue is not null and l.state = 'R' and l.suspect = lane.suspect and (l.gates is not null) = lane.is_gated
                          and l.reader = lane.reader and (l.queue, l.priority) > (lane.queue, lane.priority)
                          and (l.queue, l.priority) < (k.queue, k.priority)
                        order by l.queue, l.priority limit 1
                    )
                    union all
                    (
                        select l.queue, l.priority, '-infinity' from {schema}.lines l
                        where k.queue is null and l.state = 'R' and l.suspect = lane.suspect and (l.gates is not null) = lane.is_gated
                          and l.reader = lane.reader and (l.queue, l.priority) > (lane.queue, lane.priority)
                        order by l.queue, l.priority limit 1
                    )
                ) found
                order by found.queue, found.priority limit 1
            ) next_lane
        ), ready as (
            select r.line, r.place, r.turn, coalesce(q.priority, 100) as queue_priority, lane.priority, lane.queue, lane.suspect, lane.is_gated,
                lane.reader
            from lane
            cross join lateral (
                select l.line, l.ctid as place, l.turn from {schema}.lines l
                where l.state = 'R' and l.suspect = lane.suspect and (l.gates is not null) = lane.is_gated and l.reader = lane.reader
                  and l.queue = lane.queue and l.priority = lane.priority and l.turn >= lane.turn
                order by l.turn limit v_page
            ) r
            left join unnest(p_queue_names, p_queue_priorities) as q (name, priority) on q.name = lane.queue
            where (p_queues is null or lane.queue = any(p_queues)) and lane.queue <> all(p_closed)
        ), ranked as (
            select r.*, row_number() over (partition by r.queue, r.priority order by r.turn, r.line) as rank from ready r
        )
        select array_agg(f.line), array_agg(f.place),
            (
                select json_agg(first) from (
                    select r.suspect, r.is_gated, r.reader, r.queue, r.priority, min(r.turn) - interval '250 milliseconds' as turn
                    from ready r group by r.suspect, r.is_gated, r.reader, r.queue, r.priority limit 100
                ) first
            )
        into v_lines, v_tids, v_floors
        from (select r.line, r.place from ranked r order by r.queue_priority, r.priority, r.rank, r.turn, r.line limit v_page) f;
        if v_lines is null then
            return;
        end if;
        select array_agg(l.offer) into v_offers
        from (
            select row(
                r.line, r.is_strict, r.reader, r.suspect, r.queue, r.priority, r.name, r.gates, r.costs, r.fair, r.weight, r.credit, r.floor, r.floor_id, 0, null, r.blocked, r.place, r.prunes
            )::{schema}.line_offer as offer
            from unnest(v_lines, v_tids) as f (line, place)
            cross join lateral (
                select r.*, r.ctid as place from {schema}.lines r
                where r.ctid = f.place and r.line = f.line and r.state = 'R' limit 1 for no key update skip locked
            ) r
            limit p_most
        ) l;
        v_count := coalesce(cardinality(v_offers), 0);
        -- If other transactions have locked the first lines, there can be ready lines behind them.
        exit when v_count >= p_most or cardinality(v_lines) < v_page or v_page > 100000;
        v_page := v_page * 4 + 20;
    end loop;
    if v_count < least(p_most, cardinality(v_lines)) then
        select array_agg(f) into v_again from unnest(v_lines) f where f not in (select o.line from unnest(v_offers) o);
    end if;
    -- Gates are locked after lines, in one order. A gate that another transaction has locked is skipped.
    select array_agg(x.gate), array_agg(x.place) into v_gates, v_tids
    from (
        select a.gate, a.ctid as place from {schema}.gates a
        where a.gate in (select unnest(o.gates) from unnest(v_offers) o where o.gates is not null)
        order by a.gate for no key update skip locked
    ) x;
    -- The time is read after the locks have been acquired. So the stored times of one line or gate never overlap.
    v_granted_at := clock_timestamp();
    v_now := extract(epoch from v_granted_at);
    if v_gates is not null then
        select array_agg(coalesce({schema}.limit_room(y, m, v_now), 1000000) order by g.number), array_agg(y.reserved order by g.number),
            array_agg(y.limit_name order by g.number), jsonb_object_agg(g.gate, g.number)
        into v_rooms, v_reserved, v_limits, v_places
        from unnest(v_gates, v_tids) with ordinality as g (gate, place, number)
        cross join lateral (select * from {schema}.gates o where o.ctid = g.place) y
        left join {schema}.limits m on m.name = y.limit_name;
    end if;
    -- Count the tasks of each line. The room that a line cannot use is left to the lines behind it.
    select array_agg(w.waiting order by h.ordinality) into v_waiting
    from unnest(v_offers) with ordinality h
    cross join lateral (
        select count(*) as waiting
        from (
            select from {schema}.tasks s
            where s.serial = h.line and s.state = 'PENDING' and (s.serial_at, s.id) >= (h.floor, h.floor_id)
              and (h.is_strict or s.serial_at <= statement_timestamp())
            order by s.serial_at, s.id limit case
                when h.is_strict then 1 when h.gates is null then p_most
                else (select greatest(1, least(p_most, min(coalesce(v_rooms[(v_places ->> u)::integer], 0)))) from unnest(h.gates) u)
            end
        ) f
    ) w;
    select array_agg(distinct o.queue) into v_queues from unnest(v_offers) o;
    v_shares := array_fill(greatest(1, p_most / greatest(1, coalesce(cardinality(v_queues), 1))), array[coalesce(cardinality(v_queues), 0)]);
    -- Lines take turns, in rounds, until the claim is full. In the first round, a line without fair turns takes what is left of the share of
    -- its queue, so that queues take turns, too. The turn of a fair line ends after as many tasks as its weight. A turn that a full gate or
    -- the end of a claim has cut short continues with the line's credit, in the same place.
    v_active := array(select generate_series(1, v_count));
    for round in 1 .. p_most loop
        v_next := null;
        foreach i in array v_active loop
            exit when v_want <= 0;
            v_one := v_offers[i];
            if v_waiting[i] = 0 then
                v_again := v_again || v_one.line;
                v_offers[i].room := -1;
                continue;
            end if;
            v_place := array_position(v_queues, v_one.queue);
            v_quota := case when v_one.is_strict then 1
                            when not v_one.is_fair then case round when 1 then greatest(0, v_shares[v_place]) else v_want end
                            when v_one.credit > 0 then v_one.credit else least(1000, greatest(1, v_one.weight)) end;
            v_more := least(v_want, case when v_one.is_fair and cardinality(v_active) = 1 then v_want else v_quota end);
            if v_one.gates is not null then
                v_more := least(v_more, v_starts);
                for g in 1 .. cardinality(v_one.gates) loop
                    exit when v_more = 0;
                    v_gate := (v_places ->> v_one.gates[g])::integer;
                    if v_gate is null then
                        v_more := 0;
                        v_again := v_again || v_one.line;
                        exit;
                    end if;
                    v_cost := greatest(1, v_one.costs[g]);
                    if v_rooms[v_gate] < v_cost or (v_reserved[v_gate] and v_one.passed is distinct from v_one.gates[g]) then
                        v_more := 0;
                        v_one.full_gate := v_one.gates[g];
                    else
                        v_more := least(v_more, v_rooms[v_gate] / v_cost);
                    end if;
                end loop;
            end if;
            if v_one.is_fair and v_more > 0 then
                v_one.credit := greatest(0, v_quota - v_more);
            end if;
            v_more := least(v_more, v_waiting[i] - v_one.room);
            if v_one.gates is not null and v_more > 0 then
                for g in 1 .. cardinality(v_one.gates) loop
                    v_gate := (v_places ->> v_one.gates[g])::integer;
                    v_rooms[v_gate] := v_rooms[v_gate] - v_more * greatest(1, v_one.costs[g]);
                end loop;
                v_starts := v_starts - v_more;
            end if;
            v_one.room := v_one.room + v_more;
            v_offers[i] := v_one;
            v_want := v_want - v_more;
            v_shares[v_place] := v_shares[v_place] - v_more;
            if not v_one.is_strict and (v_more > 0 or v_quota = 0) then
                v_next := v_next || i;
            end if;
        end loop;
        exit when v_want <= 0 or v_next is null;
        v_active := v_next;
    end loop;
    -- A line whose gate is full now waits at once, behind the lines that already wait.
    for i in 1 .. v_count loop
        v_one := v_offers[i];
        continue when v_one.gates is null or v_one.full_gate is not null or v_waiting[i] = 0;
        for g in 1 .. cardinality(v_one.gates) loop
            if v_rooms[(v_places ->> v_one.gates[g])::integer] < greatest(1, v_one.costs[g]) then
                v_offers[i].full_gate := v_one.gates[g];
                exit;
            end if;
        end loop;
    end loop;
    with picked as materialized (
        select h.*, h.ordinality as number, c.ids, c.due_ats, c.serial_ats, coalesce(cardinality(c.ids), 0) as taken,
            c.serial_ats[cardinality(c.ids)] as last_at, c.ids[cardinality(c.ids)] as last_id
        from unnest(v_offers) with ordinality h
        left join lateral (
            select array_agg(c.id) as ids, array_agg(c.enqueued_at) as due_ats, array_agg(c.serial_at) as serial_ats
            from (
                -- A sender's open transaction can hold the lock of a waiting task. The tasks behind it do not wait for it.
                select * from (
                    select s.id, s.enqueued_at, s.serial_at, s.good_until, s.name, s.suspect, s.queue, s.priority, s.gates, s.costs, s.needs_id
                    from {schema}.tasks s
                    where not h.is_strict and s.serial = h.line and s.state = 'PENDING' and (s.serial_at, s.id) >= (h.floor, h.floor_id)
                      and s.fence < 9223372036854775807 and s.attempt < 2147483647
                      and s.enqueued_at <= statement_timestamp() and (s.good_until is null or s.good_until > v_granted_at)
                    order by s.serial_at, s.id limit greatest(0, h.room) for no key update skip locked
                ) free
                union all
                select * from (
                    select s.id, s.enqueued_at, s.serial_at, s.good_until, s.name, s.suspect, s.queue, s.priority, s.gates, s.costs, s.needs_id
                    from {schema}.tasks s
                    where h.is_strict and s.serial = h.line and s.state = 'PENDING'
                      and s.fence < 9223372036854775807 and s.attempt < 2147483647
                    order by s.serial_at, s.id limit greatest(0, h.room)
                ) head
            ) c
            -- The head of a strict line is chosen before it is checked, because skipping it would overtake it.
            where not h.is_strict or (
                c.enqueued_at <= statement_timestamp() and (c.good_until is null or c.good_until > v_granted_at)
                and c.name = h.name and c.suspect = h.suspect and c.queue = h.queue and c.priority = h.priority
                and c.gates is not distinct from h.gates and c.costs is not distinct from h.costs
                and (c.needs_id is null or c.needs_id::text = h.reader or c.needs_id = {schema}.mark_of(c.name, '{{"limits": true}}'))
                and not exists (
                    select from {schema}.tasks b where b.serial = h.line and b.state in ('CLAIMED', 'RUNNING') and not starts_with(b.serial, 'limit:')
                )
            )
        ) c on h.room > 0
    ), following as materialized (
        select p.*, case when p.is_strict then x.enqueued_at else x.serial_at end as next_due_at, x.serial_at as next_at, x.id as next_id
        from picked p
        left join lateral (
            select count(*) > p.taken as any
            from {schema}.tasks z
            where not p.is_strict and z.serial = p.line and z.state = 'PENDING' and (z.serial_at, z.id) >= (p.floor, p.floor_id)
              and (z.serial_at, z.id) <= (p.last_at, p.last_id) and z.fence < 9223372036854775807 and z.attempt < 2147483647
              and z.enqueued_at <= statement_timestamp() and (z.good_until is null or z.good_until > v_granted_at)
        ) skipped on p.taken > 0
        left join lateral (
            -- The line continues at the first task that was skipped.
            select z.enqueued_at, z.serial_at, z.id from {schema}.tasks z
            where z.serial = p.line and z.state = 'PENDING'
              and (z.serial_at, z.id) >= (
                  case when skipped.any then p.floor else coalesce(p.last_at, p.floor) end,
                  case when skipped.any then p.floor_id else coalesce(p.last_id, p.floor_id) end
              )
              and case when skipped.any then z.id <> all(p.ids) else z.id is distinct from p.last_id end
              and z.fence < 9223372036854775807 and z.attempt < 2147483647
            order by z.serial_at, z.id limit 1
        ) x on p.room > 0 and not (p.is_strict and p.taken > 0)
    ), moved as (
        update {schema}.lines l
        set state = s.state, blocked = case when s.state = 'B' then f.full_gate end,
            -- A line whose first task is due but could not be taken is read again after a second.
            at = case when f.next_due_at is null then l.at when s.state = 'W'
                then greatest(f.next_due_at, case when f.next_due_at <= statement_timestamp() then statement_timestamp() + interval '1 second' end)
                else f.next_due_at end,
            floor = case when f.room <= 0 or f.is_strict then l.floor else coalesce(f.next_at, 'infinity') end,
            floor_id = case when f.room <= 0 or f.is_strict then l.floor_id else coalesce(f.next_id, '00000000-0000-0000-0000-000000000000') end,
            credit = f.credit, turn = case when f.taken = 0 or f.credit > 0 then l.turn else clock_timestamp() end
        from following f
        cross join lateral (
            select case
                when f.room < 0 then 'I' when f.room = 0 then 'B' when f.next_due_at is null then 'I'
                when f.next_due_at > statement_timestamp() or f.taken = 0 then 'W'
                when f.full_gate is not null then 'B' else 'R'
            end::"char" as state
        ) s
        where l.ctid = f.place and (f.room <> 0 or f.full_gate is not null)
    ), unsure as (
        -- A strict line without a task to take might have a new head whose change has not been applied yet.
        insert into {schema}.line_changes (line)
        select p.line from picked p where p.is_strict and p.room > 0 and p.taken = 0
    )
    select array_agg(p.number), array_agg(u.id), array_agg(u.due_at), array_agg(u.serial_at)
    into v_line_places, v_ids, v_due_ats, v_serial_ats
    from picked p cross join lateral unnest(p.ids, p.due_ats, p.serial_ats) as u (id, due_at, serial_at);
    if v_gates is not null then
        update {schema}.gates g
        set held = least(2147483647, g.held::bigint + u.units)::integer, used_at = statement_timestamp(),
            next_at = case when m.starts is null or m.sliding then g.next_at
                           else greatest(g.next_at, v_now) + u.units * (m.period_s / m.starts) end,
            -- The times are sorted, because a claim that was delayed adds an earlier time than a claim that overtook it.
            recent = case when m.sliding then (
                select (array_agg(w.at order by w.at))[greatest(1, count(*) - m.starts + 1):]
                from unnest(g.recent || array_fill(v_now, array[u.units])) w (at)
            ) end
        from (
            select (v_places ->> x.gate)::integer as number, sum(greatest(1, o.costs[x.place]))::integer as units
            from unnest(v_line_places) as l (place)
            cross join lateral (select (v_offers[l.place]).gates, (v_offers[l.place]).costs) o
            cross join lateral unnest(o.gates) with ordinality as x (gate, place)
            group by x.gate
        ) u
        left join {schema}.limits m on m.name = v_limits[u.number]
        where g.ctid = v_tids[u.number];
        -- Retention deletes gates that have not been used for a day. It must not miss that a line has just begun to wait.
        update {schema}.gates g set used_at = statement_timestamp()
        from (select distinct o.full_gate as gate from unnest(v_offers) o where o.full_gate is not null) f
        where g.gate = f.gate and g.used_at < statement_timestamp() - interval '1 hour';
        -- A line that waits behind a gate with unused room continues. The same call records when a rate opens.
        select array_agg(b) into v_loose from unnest(v_gates) b where exists (select from {schema}.lines x where x.state = 'B' and x.blocked = b);
        if v_loose is not null then
            perform {schema}.unpark_lines(v_loose, p_readers, p_queues, p_channel);
        end if;
    end if;
    -- The waiting tasks of a line that keeps only some of them are judged again, because its limit has less room now.
    insert into {schema}.line_changes (line)
    select unnest(v_again)
    union all
    select o.line from unnest(v_offers) o where o.prunes and (o.room > 0 or o.full_gate is not null);
    return query
        select (row_number() over ())::integer, u.id, o.queue, o.priority, u.due_at, o.line, o.gates, o.costs, u.serial_at, v_granted_at, v_floors
        from unnest(v_line_places, v_ids, v_due_ats, v_serial_ats) as u (place, id, due_at, serial_at)
        cross join lateral (
            select (v_offers[u.place]).queue, (v_offers[u.place]).priority, (v_offers[u.place]).line, (v_offers[u.place]).gates, (v_offers[u.place]).costs
        ) o;
end
$$
