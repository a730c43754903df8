-- The workflow and the node of a task, and the task's parent if the task is a child.
alter table {schema}.tasks
    add column workflow_id uuid, add column node integer, add column parent_id uuid
