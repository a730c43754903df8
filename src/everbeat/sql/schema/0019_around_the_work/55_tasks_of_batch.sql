-- The live tasks of a batch.
create index {concurrently} tasks_of_batch on {schema}.tasks (batch_id, state)
    where batch_id is not null and state in ('PENDING', 'CLAIMED', 'RUNNING')
