-- The gates and costs of the tasks that a schedule sends.
alter table {schema}.schedules add column gates text[], add column costs integer[]
