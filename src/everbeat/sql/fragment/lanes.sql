-- The lanes, which are the queues and priorities of waiting tasks, with the due time of their first tasks. The walk needs `with recursive`. It
-- makes one index descent for each lane. Serial lines and marked tasks are not part of lanes.
lane (queue, priority, first_at) as (
    (
        select t.queue, t.priority, t.enqueued_at from {schema}.tasks t
        where t.state = 'PENDING' and t.serial is null and t.needs_id is null order by t.queue, t.priority, t.enqueued_at limit 1
    )
    union all
    select next_lane.queue, next_lane.priority, next_lane.enqueued_at
    from lane l
    cross join lateral (
        select t.queue, t.priority, t.enqueued_at from {schema}.tasks t
        where t.state = 'PENDING' and t.serial is null and t.needs_id is null and (t.queue, t.priority) > (l.queue, l.priority)
        order by t.queue, t.priority, t.enqueued_at limit 1
    ) next_lane
)
