-- The claim walks this index: a lane is one (queue, priority); within it, first in first out. Tasks of serial lines are not in it.
create index tasks_pending on {schema}.tasks (queue, priority, enqueued_at, id, name) where state = 'PENDING' and serial is null
