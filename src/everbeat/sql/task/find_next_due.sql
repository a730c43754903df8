-- Return how long an idle worker can wait: the milliseconds until the next task with these names and queues is due. The result is at most a
-- day, or null if no task is scheduled. Also return whether workflows or batches can be advanced and a suspect is due. The same for lines that
-- have changed or are ready, and for marked tasks. The margin includes tasks that became due after the claim that found nothing; in that
-- case the result is negative. With a margin of years, the statement returns whether a claim can find anything. `by_queue` has the
-- milliseconds for the `most` queues whose tasks are due first, and `others_in_ms` those for everything else. So an idle worker searches only
-- the queue whose task becomes due. A line counts in any queue: its worker only wakes up once for nothing. Marked tasks (needs_id) count only
-- if they belong to the groups in `marked`, which this worker's code understands.
with recursive marked as materialized (
    select m.needs_id, m.queue, m.priority
    from json_to_recordset(%(marked)s::json) as m (needs_id uuid, name text, queue text, priority smallint)
    where m.name = any(%(names)s::text[])
), {fragment/lanes_of_queues}, soon (queue, at) as (
    select lane.queue, first.enqueued_at
    from lane
    cross join lateral (
        select t.enqueued_at from {schema}.tasks t
        where t.state = 'PENDING' and t.serial is null and t.needs_id is null and t.queue = lane.queue and t.priority = lane.priority
          and t.enqueued_at > statement_timestamp() - %(margin_ms)s::bigint * interval '1 millisecond' and t.name = any(%(names)s::text[])
        order by t.enqueued_at limit 1
    ) first
    union all
    select m.queue, first.enqueued_at
    from marked m
    cross join lateral (
        select t.enqueued_at from {schema}.tasks t
        where t.state = 'PENDING' and t.serial is null and t.needs_id = m.needs_id and t.queue = m.queue and t.priority = m.priority
          and t.enqueued_at > statement_timestamp() - %(margin_ms)s::bigint * interval '1 millisecond'
        order by t.enqueued_at limit 1
    ) first
    where %(queues)s::text[] is null or m.queue = any(%(queues)s::text[])
    union all
    select null, first.at
    from (select unnest(%(names)s::text[]) as reader union all select distinct m.needs_id::text from marked m) r
    cross join lateral (
        select l.at from {schema}.lines l where l.state = 'W' and l.reader = r.reader order by l.at limit 1
    ) first
    union all
    (select null, g.opens_at from {schema}.gates g where g.opens_at is not null order by g.opens_at limit 1)
    union all
    (select null, m.until from {schema}.limits m where m.until is not null order by m.until limit 1)
), next_of as materialized (
    select soon.queue, min(soon.at) as at from soon group by soon.queue
), few as materialized (
    select n.queue, n.at from next_of n where n.queue is not null order by n.at limit %(most)s
)
select
    extract(epoch from min(least(n.at, statement_timestamp() + interval '1 day')) - statement_timestamp()) * 1000 as due_in_ms,
    exists (select from {schema}.outbox) or (
        select e.batch_id from {schema}.batch_events e order by e.batch_id, e.id limit 1
    ) is not null as happened,
    {fragment/is_suspect_due} as suspects,
    {fragment/have_lines_changed} as lines_changed,
    exists (select from {schema}.lines l where l.state = 'R') as lines_ready,
    -- With `exists`, the planner would ignore the order, and could read the whole table.
    coalesce(
        (
            select t.needs_id from {schema}.tasks t where t.state = 'PENDING' and t.serial is null and t.needs_id is not null
            order by t.needs_id, t.queue, t.priority limit 1
        ),
        (
            select t.needs_id from {schema}.tasks t where t.state = 'PENDING' and t.serial is not null and t.needs_id is not null
            order by t.needs_id limit 1
        )
    ) is not null as has_marked,
    extract(epoch from min(least(n.at, statement_timestamp() + interval '1 day')) filter (where n.queue is null or not exists (
        select from few f where f.queue = n.queue
    )) - statement_timestamp()) * 1000 as others_in_ms,
    (
        select json_object_agg(f.queue, extract(epoch from least(f.at, statement_timestamp() + interval '1 day') - statement_timestamp()) * 1000)::text
        from few f
    ) as by_queue
from next_of n
