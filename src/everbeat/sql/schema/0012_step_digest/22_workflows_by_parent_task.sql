-- The workflows that a task has started.
create index {concurrently} workflows_by_parent_task on {schema}.workflows (parent_task_id) where parent_task_id is not null
