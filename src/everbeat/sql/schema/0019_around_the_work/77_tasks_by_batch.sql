-- All tasks of a batch by id, for the list of its tasks. It has no entry for a task without a batch.
create index {concurrently} tasks_by_batch on {schema}.tasks (batch_id, id) where batch_id is not null
