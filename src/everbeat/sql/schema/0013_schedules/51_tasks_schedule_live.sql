-- The runs of a schedule that have not ended, for its overlap policy.
create index {concurrently} tasks_schedule on {schema}.tasks (schedule) where schedule is not null and state in ('PENDING', 'CLAIMED', 'RUNNING')
