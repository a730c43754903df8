-- The lanes of the given queues, or all lanes if `queues` is null. The walk begins with one row for each queue, whose priority is below all
-- others. It needs `with recursive`. fragment/lanes describes lanes.
lane (queue, priority) as (
    select coalesce(q.name, ''), -32769
    from (select null::text where %(queues)s::text[] is null union all select distinct unnest(%(queues)s::text[])) q (name)
    union all
    select next_lane.queue, next_lane.priority::integer
    from lane
    cross join lateral (
        (
            select t.queue, t.priority from {schema}.tasks t
            where %(queues)s::text[] is null and t.state = 'PENDING' and t.serial is null and t.needs_id is null
              and (t.queue, t.priority) > (lane.queue, lane.priority)
            order by t.queue, t.priority limit 1
        )
        union all
        (
            select t.queue, t.priority from {schema}.tasks t
            where %(queues)s::text[] is not null and t.state = 'PENDING' and t.serial is null and t.needs_id is null
              and t.queue = lane.queue and t.priority > lane.priority
            order by t.priority limit 1
        )
    ) next_lane
)
