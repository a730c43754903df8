-- The groups of marked tasks by needs, queue and priority, with the due time of their first tasks. They are read in the same way as in fragment/lanes.
-- Read a limited number of groups, because hand-written marks can all differ.
marked_lane (needs_id, queue, priority, first_at) as (
    (
        select t.needs_id, t.queue, t.priority, t.enqueued_at from {schema}.tasks t
        where t.state = 'PENDING' and t.serial is null and t.needs_id is not null order by t.needs_id, t.queue, t.priority, t.enqueued_at limit 1
    )
    union all
    select next_lane.needs_id, next_lane.queue, next_lane.priority, next_lane.enqueued_at
    from marked_lane l
    cross join lateral (
        select t.needs_id, t.queue, t.priority, t.enqueued_at from {schema}.tasks t
        where t.state = 'PENDING' and t.serial is null and t.needs_id is not null
          and (t.needs_id, t.queue, t.priority) > (l.needs_id, l.queue, l.priority)
        order by t.needs_id, t.queue, t.priority, t.enqueued_at limit 1
    ) next_lane
)
