-- The labels of the tasks that a schedule sends.
alter table {schema}.schedules add column labels jsonb
