-- The version of the schedules that the worker's code declares.
alter table {schema}.workers add column schedule_owner text, add column schedule_version text
