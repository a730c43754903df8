-- A send that is repeated after a lost reply finds the task that its first try changed.
create index {concurrently} tasks_last_send on {schema}.tasks (last_send) where last_send is not null
