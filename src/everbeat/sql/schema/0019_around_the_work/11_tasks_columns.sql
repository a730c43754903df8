-- The columns are null for most tasks, and then take no space.
alter table {schema}.tasks add column labels jsonb, add column on_failure json
