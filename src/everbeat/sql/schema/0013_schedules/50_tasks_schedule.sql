-- The schedule that sent the task, and the tick that the task stands for.
alter table {schema}.tasks add column schedule text, add column tick timestamptz
