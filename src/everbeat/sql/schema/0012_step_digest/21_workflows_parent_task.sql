-- The task that started the workflow through Context.start. A cancel of that task cancels the workflow. parent_id is the workflow that
-- contains this workflow as a node.
alter table {schema}.workflows add column parent_task_id uuid
