-- The column is null for most tasks, and then takes no space.
alter table {schema}.tasks add column labels jsonb
