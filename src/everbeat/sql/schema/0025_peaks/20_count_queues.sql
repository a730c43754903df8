-- Counts the waiting tasks of queues that have these lanes, as count_lane does for one lane without marked tasks. All queues are counted in one
-- call, and at most `p_most` + 1 tasks of each. `p_firsts` are the times of the first tasks of the lanes. `oldest` is the due time of the oldest due task, without
-- times that only another program can have written. With these settings, PostgreSQL reads the entries of an index in their order,
-- even if its statistics do not know a new backlog. One scan reads all lanes of a queue.
create function {schema}.count_queues(p_queues text[], p_priorities smallint[], p_firsts timestamptz[], p_most bigint)
returns table (queue text, due bigint, oldest timestamptz, later bigint, suspended bigint) language plpgsql stable
    set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_hashjoin = off set enable_mergejoin = off
    set enable_material = off set jit = off set max_parallel_workers_per_gather = 0 set plan_cache_mode = force_generic_plan as $$
begin
    return query
    select l.queue, d.due, least(l.oldest, early.oldest), n.later, s.suspended
    from (
        select
            x.queue, array_agg(x.priority) as priorities,
            array_agg(x.priority) filter (where x.first_at < '0002-01-01 00:00:00+00') as early_priorities,
            min(x.first_at) filter (where x.first_at >= '0002-01-01 00:00:00+00' and x.first_at <= statement_timestamp()) as oldest
        from unnest(p_queues, p_priorities, p_firsts) x (queue, priority, first_at)
        group by x.queue
    ) l
    cross join lateral (
        select count(*) as due from (
            select from {schema}.tasks t
            where t.state = 'PENDING' and t.serial is null and t.needs_id is null and t.queue = l.queue and t.priority = any(l.priorities)
              and t.enqueued_at <= statement_timestamp()
            limit p_most + 1
        ) x
    ) d
    cross join lateral (
        select min(first.enqueued_at) as oldest
        from unnest(l.early_priorities) p (priority)
        cross join lateral (
            select t.enqueued_at from {schema}.tasks t
            where t.state = 'PENDING' and t.serial is null and t.needs_id is null and t.queue = l.queue and t.priority = p.priority
              and t.enqueued_at >= '0002-01-01 00:00:00+00' and t.enqueued_at <= statement_timestamp()
            order by t.enqueued_at, t.id limit 1
        ) first
    ) early
    cross join lateral (
        select count(*) as later from (
            select from {schema}.tasks t
            where t.state = 'PENDING' and t.serial is null and t.needs_id is null and t.queue = l.queue and t.priority = any(l.priorities)
              and t.enqueued_at > statement_timestamp()
            limit p_most + 1
        ) x
    ) n
    cross join lateral (
        select count(*) as suspended from (
            select from {schema}.tasks t
            where t.state = 'PENDING' and t.serial is null and t.needs_id is null and t.wake_at is not null
              and t.queue = l.queue and t.priority = any(l.priorities) and t.enqueued_at > statement_timestamp() and t.wake_at > statement_timestamp()
            limit p_most + 1
        ) x
    ) s;
end
$$
