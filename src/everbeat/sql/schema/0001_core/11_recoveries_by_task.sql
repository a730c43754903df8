-- The recoveries of a task.
create index recoveries_by_task on {schema}.recoveries (task_id)
