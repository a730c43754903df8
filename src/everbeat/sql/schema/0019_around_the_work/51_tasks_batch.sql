-- The batch or the gather to which a task belongs. It is null for most tasks, and then takes no space.
alter table {schema}.tasks add column batch_id uuid
