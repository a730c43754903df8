-- The claim walks this index: a lane is one (queue, priority); within it, first in first out. It leaves out the tasks of serial lines and
-- the marked tasks, so tasks that a worker does not understand make no claim longer.
create index {concurrently} tasks_pending on {schema}.tasks (queue, priority, enqueued_at, id, name)
    where state = 'PENDING' and serial is null and needs_id is null
