-- The children of a task.
create index tasks_by_parent on {schema}.tasks (parent_id) where parent_id is not null
