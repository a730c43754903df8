-- Failed tasks by the time of their failure. `everbeat doctor` reads the newest ones.
create index {concurrently} tasks_failed on {schema}.tasks (failed_at) where state = 'FAILED'
