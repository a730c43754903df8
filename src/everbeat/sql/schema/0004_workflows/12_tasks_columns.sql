-- Of which node of which workflow a task is; of which task it is a child.
alter table {schema}.tasks
    add column workflow_id uuid, add column node integer, add column parent_id uuid
