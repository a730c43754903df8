-- Marked tasks by their needs. A claim reads only the groups that its worker understands.
create index {concurrently} tasks_marked on {schema}.tasks (needs_id, queue, priority, enqueued_at, id)
    where state = 'PENDING' and serial is null and needs_id is not null
