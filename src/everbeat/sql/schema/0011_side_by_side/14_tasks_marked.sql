-- Marked tasks by what they need. A claim reads the groups that its worker understands and no others.
create index {concurrently} tasks_marked on {schema}.tasks (needs_id, queue, priority, enqueued_at, id)
    where state = 'PENDING' and serial is null and needs_id is not null
