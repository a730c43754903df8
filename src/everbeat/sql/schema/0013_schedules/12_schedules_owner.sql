-- The declared schedules of an app.
create index schedules_owner on {schema}.schedules (owner) where owner is not null
