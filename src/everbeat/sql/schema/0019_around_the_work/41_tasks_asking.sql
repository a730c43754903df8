-- Finds the tasks that wait for an answer, by id.
create index {concurrently} tasks_asking on {schema}.tasks (id)
    where state in ('PENDING', 'CLAIMED', 'RUNNING') and starts_with(waits_for, 'answer/')
