-- Claims scan this index. A lane is one (queue, priority), first in, first out. The index leaves out tasks of serial lines and marked
-- tasks, so tasks that a worker does not understand slow down no claim.
create index {concurrently} tasks_pending on {schema}.tasks (queue, priority, enqueued_at, id, name)
    where state = 'PENDING' and serial is null and needs_id is null
