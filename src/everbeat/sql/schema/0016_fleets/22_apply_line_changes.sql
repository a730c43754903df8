-- Apply the noted changes, the lines that have become due, the rates that have opened and the limits that have changed to `lines` and
-- `gates`. Only one caller at a time does this. It never waits for a lock: changes of lines and gates that a claim has locked stay. `is_busy`
-- says that changes are left, or that another caller applies them. The function can be repeated at any time. Its changes and the rows of
-- `line_changes` that it deletes are kept or lost together. So its commit need not be written to disk at once.
create or replace function {schema}.apply_line_changes(
    p_most integer, p_readers text[], p_queues text[], p_channel text, out applied integer, out is_busy boolean
) language plpgsql
    set enable_seqscan = off set enable_mergejoin = off set enable_hashjoin = off set plan_cache_mode = force_generic_plan as $$
declare
    t timestamptz := statement_timestamp();
    floor xid8; low xid8; first xid8;
    ls text[]; os timestamptz[]; gs text[]; gf integer[]; locked text[]; places tid[]; ats timestamptz[]; released integer[]; closed double precision[]; gx double precision[]; opened text[]; changed text[]; due text[]; fresh text[]; pruned text[];
begin
    applied := 0;
    is_busy := false;
    select last_value::text::xid8 into floor from {schema}.line_changes_floor;
    if floor <= pg_snapshot_xmin(pg_current_snapshot())
        and not exists (select from {schema}.line_changes where xid >= floor and freed)
        and not exists (select from {schema}.line_changes where xid >= floor and not freed)
        and not exists (
            select from unnest(p_readers) as r (reader)
            cross join lateral (select from {schema}.lines l where l.state = 'W' and l.reader = r.reader and l.at <= t limit 1) due
        )
        and not exists (select from {schema}.gates where opens_at <= t)
        and not exists (select from {schema}.limits where until <= t)
        and not exists (select from {schema}.limits where has_old_lines)
        and not exists (
            select from {schema}.limits m
            where m.has_old_gates
              and (select min(g.version) from {schema}.gates g where g.limit_name = m.name) < m.version
        )
    then
        return;
    end if;
    if not pg_try_advisory_xact_lock(7001, '{schema}.lines'::regclass::oid::integer) then
        is_busy := true;
        return;
    end if;
    -- A setting of the function itself would end with the function, and the commit follows later.
    perform set_config('synchronous_commit', 'off', true);
    update {schema}.limits l
    set concurrency = d.concurrency, starts = d.starts, period_s = d.period_s, burst = coalesce(d.burst, 1),
        set_by = null, set_at = null, reason = null, until = null
    from (select o.name, o.declared from {schema}.limits o where o.until <= t for no key update skip locked) o
    cross join lateral json_to_record(coalesce(o.declared, '{{}}')) as d (concurrency integer, starts integer, period_s double precision, burst integer)
    where o.name = l.name;
    -- Only one caller at a time is here, so no line is judged by the earlier values after this statement.
    with judged as (
        update {schema}.limits l set has_old_lines = false
        from (select o.name from {schema}.limits o where o.has_old_lines for no key update skip locked) o
        where o.name = l.name
        returning l.name
    )
    insert into {schema}.line_changes (line)
    select l.line from {schema}.lines l
    where exists (select from unnest(l.gates) u where split_part(u, '/', 1) in (select j.name from judged j)) and exists (select from judged);
    select last_value::text::xid8 into floor from {schema}.line_changes_floor;
    -- Transactions from `low` on might still add rows. No more rows appear below it. It is read before the rows, in its own statement. The
    -- floor moves only over rows that earlier, committed calls have deleted, because a sequence is not rolled back.
    low := pg_snapshot_xmin(pg_current_snapshot());
    if low < floor then  -- the schema was restored into another cluster
        floor := '0';
        perform {schema}.move_floor(0);
    end if;
    select coalesce(min(x.xid), low) into first from (
        (select xid from {schema}.line_changes where xid >= floor and freed order by xid limit 1)
        union all
        (select xid from {schema}.line_changes where xid >= floor and not freed order by xid limit 1)
    ) x;
    if least(first, low) > floor then
        floor := least(first, low);
        perform {schema}.move_floor(floor::text::bigint);
    end if;
    with gone as (
        delete from {schema}.line_changes where ctid = any(
            array(select ctid from {schema}.line_changes where xid >= floor and freed order by xid limit p_most)
            || array(select ctid from {schema}.line_changes where xid >= floor and not freed order by xid limit p_most)
            || array(select ctid from {schema}.line_changes where xid >= floor and closed_until is not null order by xid limit p_most)
        )
        returning line, gates, costs, freed, at, closed_until
    ), l as (  -- an index cannot store longer names, and the tasks table cannot either
        select line, coalesce(min(at), 'infinity') as at from gone where octet_length(line) <= 2500 group by line
    ), g as (
        select u.gate, least(2147483647, sum(case when gone.freed then greatest(1, gone.costs[u.place])::bigint else 0 end))::integer as freed, max(gone.closed_until) as closed_until
        from gone cross join unnest(gone.gates) with ordinality as u (gate, place)
        where octet_length(u.gate) <= 2500 group by u.gate
    )
    select (select count(*) from gone), (select array_agg(line order by line) from l), (select array_agg(at order by line) from l),
        (select array_agg(gate order by gate) from g), (select array_agg(freed order by gate) from g),
        (select array_agg(closed_until order by gate) from g)
    into applied, ls, os, gs, gf, gx;
    select array_agg(d.line order by d.line) into due from (
        select due.line from unnest(p_readers) as r (reader)
        cross join lateral (
            select l.line from {schema}.lines l where l.state = 'W' and l.reader = r.reader and l.at <= t order by l.at limit p_most
            for no key update skip locked
        ) due
        limit p_most
    ) d where d.line <> all(coalesce(ls, '{{}}'));
    ls := ls || due;
    os := os || array_fill('infinity'::timestamptz, array[coalesce(cardinality(due), 0)]);
    if ls is not null then
        -- A line is found by its name only once, and later by its place in the table. A search by name reads all versions of a row that an
        -- old snapshot keeps.
        for try in 1 .. 2 loop
            select array_agg(k.line), array_agg(k.place), array_agg(d.at) into locked, places, ats
            from unnest(ls, os) as d (line, at)
            cross join lateral (select o.line, o.ctid as place from {schema}.lines o where o.line = d.line limit 1 for no key update skip locked) k;
            exit when cardinality(locked) = cardinality(ls) or try = 2;
            -- "on conflict" waits for a transaction that has changed the existing row, so only new rows are inserted.
            insert into {schema}.lines (line, is_strict)
            select d.line, not starts_with(d.line, 'limit:') from (select unnest(ls) as line except select unnest(locked)) d
            where not exists (select from {schema}.lines l where l.line = d.line) on conflict do nothing;
        end loop;
        if coalesce(cardinality(locked), 0) < cardinality(ls) then
            is_busy := true;
            insert into {schema}.line_changes (line, at)
            select d.line, nullif(d.at, 'infinity')
            from unnest(ls, os) as d (line, at) where d.line in (select unnest(ls) except select unnest(locked));
        end if;
        -- A new statement has a new snapshot, so it sees everything that was committed before the locks were acquired.
        with found as materialized (
            select d.line, d.place, o.is_strict, o.state as was, o.blocked as was_at, first.*, held.held_id is not null as is_held,
                coalesce(m.fair, false) as fair, coalesce(m.weight, 1) as weight, coalesce(m.prunes, false) as prunes
            from unnest(locked, places, ats) as d (line, place, at)
            cross join lateral (select * from {schema}.lines o where o.ctid = d.place) o
            left join lateral (
                select h.name, h.queue, h.priority,
                    -- A strict line whose first task has expired is read again after a second, because the task is not EXPIRED yet.
                    case when o.is_strict then greatest(h.enqueued_at, case when h.good_until <= t then t + interval '1 second' end)
                        else h.serial_at end as enqueued_at,
                    h.gates, h.costs, h.serial_at, h.id, h.suspect,
                    case when octet_length(h.name) + octet_length(h.queue) > 2500 then null when h.needs_id is null or h.needs_id = {schema}.mark_of(h.name, '{{"limits": true}}') then h.name
                        else h.needs_id::text end as reader
                from {schema}.tasks h
                where h.serial = d.line and h.state = 'PENDING' and (h.serial_at, h.id) >= (
                      case when o.is_strict then '-infinity' else least(o.floor, d.at) end,
                      case when o.is_strict or d.at <= o.floor then '00000000-0000-0000-0000-000000000000'::uuid else o.floor_id end)
                  and h.fence < 9223372036854775807 and h.attempt < 2147483647 and (o.is_strict or h.good_until is null or h.good_until > t)
                order by h.serial_at, h.id limit 1
            ) first on true
            left join lateral (
                select b.id as held_id from {schema}.tasks b where o.is_strict and b.serial = d.line and b.state in ('CLAIMED', 'RUNNING') and not starts_with(b.serial, 'limit:') limit 1
            ) held on true
            left join lateral (
                select bool_or(m.fair and not o.is_strict) as fair, bool_or(m.when_full <> 'wait' and not o.is_strict) as prunes,
                    max(case when m.fair then {schema}.weight_of(m.weights, substr(u, strpos(u, '/') + 1)) end) as weight
                from unnest(first.gates) u join {schema}.limits m on m.name = split_part(u, '/', 1)
            ) m on first.gates is not null
        ), changed as (
            update {schema}.lines l set
                name = f.name, reader = f.reader, suspect = coalesce(f.suspect, false), queue = case when f.reader is not null then f.queue end, priority = f.priority,
                gates = f.gates, costs = f.costs, at = f.enqueued_at, fair = f.fair, weight = f.weight, prunes = f.prunes,
                floor = case when f.is_strict then '-infinity' else coalesce(f.serial_at, 'infinity') end,
                floor_id = case when f.is_strict or f.id is null then '00000000-0000-0000-0000-000000000000' else f.id end,
                state = s.state, blocked = case when s.state = 'B' or (s.state = 'R' and l.state = 'R') then l.blocked end,
                turn = case when l.state = s.state and l.state in ('R', 'B') then l.turn else clock_timestamp() end
            from found f
            cross join lateral (
                select case when f.reader is null or f.is_held then 'I' when f.enqueued_at > t then 'W'
                            when f.was = 'B' and not f.is_strict then 'B' else 'R' end::"char" as state
            ) s
            where l.ctid = f.place
        ), passed_on as (
            -- The lines behind a line that does not wait any longer are judged again, because its gate might have been reserved for it.
            insert into {schema}.line_changes (gates)
            select distinct array[f.was_at] from found f
            where f.was = 'B' and (f.is_strict or f.reader is null or f.is_held or f.enqueued_at > t)
        )
        select array_agg(f.line) filter (where f.prunes),
            array(
                select distinct x from found f cross join unnest(f.gates) x
                where octet_length(x) <= 2500 and not exists (select from {schema}.gates g where g.gate = x)
            )
        into pruned, fresh from found f;
    end if;
    select array_agg(o.gate) into opened
    from (
        select gate from {schema}.gates where opens_at <= t and gate <> all(coalesce(gs, '{{}}')) order by opens_at limit p_most
        for no key update skip locked
    ) o;
    -- The gates of a limit that has changed.
    select array_agg(o.gate) into changed
    from (
        select k.gate
        from {schema}.limits m
        cross join lateral (
            select g.gate from {schema}.gates g where g.limit_name = m.name and g.version < m.version
            order by g.version limit p_most for no key update skip locked
        ) k
        where m.has_old_gates
        limit p_most
    ) o
    where o.gate <> all(coalesce(gs, '{{}}')) and o.gate <> all(coalesce(opened, '{{}}'));
    is_busy := is_busy or coalesce(cardinality(changed), 0) >= p_most;
    -- A claim that began a day ago is not expected to commit. So no gate with an older version appears any longer.
    update {schema}.limits l set has_old_gates = false
    from (
        select o.name from {schema}.limits o
        where o.has_old_gates and o.changed_at < t - interval '1 day'
          and coalesce((select min(g.version) from {schema}.gates g where g.limit_name = o.name), o.version) >= o.version
        for no key update skip locked
    ) o
    where o.name = l.name;
    opened := opened || changed;
    insert into {schema}.gates (gate, limit_name, version)
    select x, split_part(x, '/', 1), coalesce((select m.version from {schema}.limits m where m.name = split_part(x, '/', 1)), 0)
    from unnest(fresh) x order by x on conflict do nothing;
    if gs is not null or opened is not null then
        for try in 1 .. 2 loop
            select array_agg(k.gate), array_agg(k.place), array_agg(d.freed), array_agg(d.closed_until) into locked, places, released, closed
            from unnest(gs, gf, gx) as d (gate, freed, closed_until)
            cross join lateral (select o.gate, o.ctid as place from {schema}.gates o where o.gate = d.gate limit 1 for no key update skip locked) k;
            exit when gs is null or cardinality(locked) = cardinality(gs) or try = 2;
            insert into {schema}.gates (gate, limit_name)
            select d.gate, split_part(d.gate, '/', 1) from (select unnest(gs) as gate except select unnest(locked)) d
            where not exists (select from {schema}.gates g where g.gate = d.gate) on conflict do nothing;
        end loop;
        if coalesce(cardinality(locked), 0) < cardinality(gs) then
            is_busy := true;
            insert into {schema}.line_changes (gates, costs, freed, closed_until)
            select array[d.gate], array[d.freed], d.freed > 0, d.closed_until
            from unnest(gs, gf, gx) as d (gate, freed, closed_until) where d.gate in (select unnest(gs) except select unnest(locked));
        end if;
        with updated as (
            update {schema}.gates g
            set held = greatest(0, g.held::bigint - d.freed)::integer, closed_until = case when d.closed_until = '-infinity' then 0 else greatest(g.closed_until, d.closed_until) end, used_at = t
            from unnest(places, released, closed) as d (place, freed, closed_until)
            where g.ctid = d.place
            returning g.gate, g.opens_at, g.reserved
        )
        select array_agg(u.gate) into locked
        from updated u
        where u.opens_at is not null or u.reserved or exists (select from {schema}.lines l where l.state = 'B' and l.blocked = u.gate);
        locked := locked || opened;
        if locked is not null then
            perform {schema}.unpark_lines(locked, p_readers, p_queues, p_channel);
        end if;
    end if;
    -- The gates are up to date now.
    if pruned is not null then
        perform {schema}.cancel_surplus(pruned, p_channel);
    end if;
end
$$
