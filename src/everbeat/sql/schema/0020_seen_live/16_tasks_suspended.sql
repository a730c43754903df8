-- The suspended tasks of a lane, which are counted without reading their rows. Other tasks have no entry.
create index {concurrently} tasks_suspended on {schema}.tasks (queue, priority, enqueued_at, wake_at)
    where state = 'PENDING' and serial is null and needs_id is null and wake_at is not null
