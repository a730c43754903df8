-- The declared schedules of an app.
create index {concurrently} schedules_owner on {schema}.schedules (owner) where owner is not null
