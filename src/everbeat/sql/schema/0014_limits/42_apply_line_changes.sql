-- Apply the noted changes, the lines that have become due and the rates that have opened to `lines` and `gates`. Only one caller at a time
-- does this. It never waits for a lock: changes of lines and gates that a claim has locked stay. `is_busy` says that changes are left, or
-- that another caller applies them. The function can be repeated at any time. Its changes and the rows of
-- `line_changes` that it deletes are kept or lost together. So its commit need not be written to disk at once.
create function {schema}.apply_line_changes(
    p_most integer, p_readers text[], p_queues text[], p_channel text, out applied integer, out is_busy boolean
) language plpgsql
    set enable_seqscan = off set enable_mergejoin = off set enable_hashjoin = off set plan_cache_mode = force_generic_plan as $$
declare
    t timestamptz := statement_timestamp();
    floor xid8; low xid8; first xid8; ended integer;
    ls text[]; os timestamptz[]; gs text[]; gf integer[]; locked text[]; gx double precision[]; opened text[]; due text[]; fresh text[]; newest text[]; dropping text[];
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
    from {schema}.limits o
    cross join lateral json_to_record(coalesce(o.declared, '{{}}')) as d (concurrency integer, starts integer, period_s double precision, burst integer)
    where o.name = l.name and l.until <= t;
    get diagnostics ended = row_count;
    if ended > 0 then
        insert into {schema}.line_changes (gates)
        select array[g.gate] from {schema}.gates g where exists (select from {schema}.lines l where l.state = 'B' and l.blocked = g.gate);
    end if;
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
    select array_agg(o.gate) into opened from (select gate from {schema}.gates where opens_at <= t order by opens_at limit p_most) o;
    ls := ls || due;
    os := os || array_fill('infinity'::timestamptz, array[coalesce(cardinality(due), 0)]);
    if ls is not null then
        -- "on conflict" waits for a transaction that has changed the existing row, so only new rows are inserted.
        insert into {schema}.lines (line, is_strict)
        select x, not starts_with(x, 'limit:') from unnest(ls) x
        where not exists (select from {schema}.lines l where l.line = x) order by x on conflict do nothing;
        select array_agg(k.line) into locked
        from (select line from {schema}.lines where line = any(ls) order by line for no key update skip locked) k;
        if coalesce(cardinality(locked), 0) < cardinality(ls) then
            is_busy := true;
            insert into {schema}.line_changes (line, at)
            select d.line, nullif(d.at, 'infinity') from unnest(ls, os) as d (line, at) where d.line <> all(coalesce(locked, '{{}}'));
        end if;
        -- A new statement has a new snapshot, so it sees everything that was committed before the locks were acquired.
        with found as materialized (
            select d.line, o.is_strict, o.state as was, first.*, held.id is not null as is_held,
                coalesce(m.fair, false) as fair, coalesce(m.weight, 1) as weight, coalesce(m.newest, false) as newest, coalesce(m.drops, false) as drops
            from unnest(ls, os) as d (line, at)
            cross join lateral (select * from {schema}.lines o where o.line = d.line and o.line = any(locked)) o
            left join lateral (
                select h.name, h.queue, h.priority,
                    -- The line of a task that has expired is read again after a second, because the task is not EXPIRED yet.
                    case when h.good_until <= t then greatest(h.enqueued_at, t + interval '1 second') else h.enqueued_at end as enqueued_at,
                    h.gates, h.costs, h.serial_at, h.suspect,
                    case when octet_length(h.name) + octet_length(h.queue) > 2500 then null when h.needs_id is null or h.needs_id = {schema}.mark_of(h.name, '{{"limits": true}}') then h.name
                        else h.needs_id::text end as reader
                from {schema}.tasks h
                where h.serial = d.line and h.state = 'PENDING' and h.serial_at >= case when o.is_strict then '-infinity' else least(o.floor, d.at) end
                  and h.fence < 9223372036854775807 and h.attempt < 2147483647
                order by h.serial_at, h.id limit 1
            ) first on true
            left join lateral (
                select b.id from {schema}.tasks b where o.is_strict and b.serial = d.line and b.state in ('CLAIMED', 'RUNNING') limit 1
            ) held on true
            left join lateral (
                select bool_or(m.fair and not o.is_strict) as fair, bool_or(m.when_full = 'newest' and not o.is_strict) as newest,
                    bool_or(m.when_full = 'drop' and not o.is_strict) as drops,
                    max(case when m.fair then {schema}.weight_of(m.weights, substr(u, strpos(u, '/') + 1)) end) as weight
                from unnest(first.gates) u join {schema}.limits m on m.name = split_part(u, '/', 1)
            ) m on first.gates is not null
        ), changed as (
            update {schema}.lines l set
                name = f.name, reader = f.reader, suspect = coalesce(f.suspect, false), queue = case when f.reader is not null then f.queue end, priority = f.priority,
                gates = f.gates, costs = f.costs, at = f.enqueued_at, fair = f.fair, weight = f.weight,
                floor = case when f.is_strict then '-infinity' else coalesce(f.serial_at, 'infinity') end,
                state = s.state, blocked = case when s.state = 'B' or (s.state = 'R' and l.state = 'R') then l.blocked end,
                turn = case when l.state = s.state and l.state in ('R', 'B') then l.turn else t end
            from found f
            cross join lateral (
                select case when f.reader is null or f.is_held then 'I' when f.enqueued_at > t then 'W'
                            when f.was = 'B' and not f.is_strict then 'B' else 'R' end::"char" as state
            ) s
            where l.line = f.line
        )
        select array_agg(f.line) filter (where f.newest), array_agg(f.line) filter (where f.drops) into newest, dropping from found f;
        select array_agg(distinct x) into fresh
        from {schema}.lines l cross join unnest(l.gates) x
        where l.line = any(locked) and octet_length(x) <= 2500 and not exists (select from {schema}.gates g where g.gate = x);
    end if;
    fresh := fresh || gs;
    if fresh is not null then
        insert into {schema}.gates (gate, limit_name)
        select distinct x, split_part(x, '/', 1) from unnest(fresh) x
        where not exists (select from {schema}.gates g where g.gate = x) order by x on conflict do nothing;
    end if;
    if gs is not null or opened is not null then
        select array_agg(k.gate) into locked
        from (select gate from {schema}.gates where gate = any(gs || opened) order by gate for no key update skip locked) k;
        if exists (select from unnest(gs) as g (gate) where g.gate <> all(coalesce(locked, '{{}}'))) then
            is_busy := true;
            insert into {schema}.line_changes (gates, costs, freed, closed_until)
            select array[d.gate], array[d.freed], d.freed > 0, d.closed_until
            from unnest(gs, gf, gx) as d (gate, freed, closed_until) where d.gate <> all(coalesce(locked, '{{}}'));
        end if;
        update {schema}.gates g
        set held = greatest(0, g.held::bigint - d.freed)::integer, closed_until = greatest(g.closed_until, d.closed_until), used_at = t
        from unnest(gs, gf, gx) as d (gate, freed, closed_until)
        where g.gate = d.gate and g.gate = any(locked);
        select array_agg(g.gate) into locked
        from {schema}.gates g
        where g.gate = any(locked) and (
            g.opens_at is not null or g.reserved or exists (select from {schema}.lines l where l.state = 'B' and l.blocked = g.gate)
        );
        if locked is not null then
            perform {schema}.unpark_lines(locked, p_readers, p_queues, p_channel);
        end if;
    end if;
    -- The gates are up to date now.
    if newest is not null then
        perform {schema}.keep_newest(newest, p_channel);
    end if;
    if dropping is not null then
        perform {schema}.cancel_surplus(dropping, p_channel);
    end if;
end
$$
