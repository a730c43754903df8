-- Counts the waiting tasks of a lane, or of a group of marked tasks if `p_needs_id` is set. `due` and `later` are disjoint, `oldest` is the due time
-- of the oldest due task, and `suspended` is a part of `later`. Each count stops behind `p_most`. The settings make PostgreSQL read the entries of an index in
-- their order. Otherwise it could read and sort a whole backlog, because its statistics do not know a backlog that has grown just now.
create function {schema}.count_lane(
    p_queue text, p_priority smallint, p_needs_id uuid, p_most bigint, out due bigint, out oldest timestamptz, out later bigint, out suspended bigint
) language plpgsql stable
    set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set plan_cache_mode = force_generic_plan as $$
begin
    if p_needs_id is null then
        select count(*), min({schema}.plausible(d.enqueued_at)) into due, oldest from (
            select t.enqueued_at from {schema}.tasks t
            where t.state = 'PENDING' and t.serial is null and t.needs_id is null and t.queue = p_queue and t.priority = p_priority
              and t.enqueued_at <= statement_timestamp()
            order by t.enqueued_at, t.id limit p_most + 1
        ) d;
        select count(*) into later from (
            select from {schema}.tasks t
            where t.state = 'PENDING' and t.serial is null and t.needs_id is null and t.queue = p_queue and t.priority = p_priority
              and t.enqueued_at > statement_timestamp()
            order by t.enqueued_at, t.id limit p_most + 1
        ) l;
        select count(*) into suspended from (
            select from {schema}.tasks t
            where t.state = 'PENDING' and t.serial is null and t.needs_id is null and t.wake_at is not null
              and t.queue = p_queue and t.priority = p_priority and t.enqueued_at > statement_timestamp() and t.wake_at > statement_timestamp()
            order by t.enqueued_at limit p_most + 1
        ) s;
    else
        select count(*), min({schema}.plausible(d.enqueued_at)) into due, oldest from (
            select t.enqueued_at from {schema}.tasks t
            where t.state = 'PENDING' and t.serial is null and t.needs_id = p_needs_id and t.queue = p_queue and t.priority = p_priority
              and t.enqueued_at <= statement_timestamp()
            order by t.enqueued_at, t.id limit p_most + 1
        ) d;
        select count(*), count(*) filter (where s.wake_at > statement_timestamp()) into later, suspended from (
            select t.wake_at from {schema}.tasks t
            where t.state = 'PENDING' and t.serial is null and t.needs_id = p_needs_id and t.queue = p_queue and t.priority = p_priority
              and t.enqueued_at > statement_timestamp()
            order by t.enqueued_at, t.id limit p_most + 1
        ) s;
    end if;
end
$$
