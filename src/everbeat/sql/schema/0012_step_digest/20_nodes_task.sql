-- A member of a map over a task names that task when the member becomes READY. Earlier code treats every map over a result as a map over a
-- task. For a map over a workflow, it would insert READY members without a task. The database rejects these, and a worker of this version
-- advances the workflow instead. All other rows and states are allowed, so that a damaged row can still be cancelled or fail. The check is
-- "not valid" because validating it would read the whole table under an exclusive lock.
alter table {schema}.nodes
    add constraint nodes_task check (task is not null or kind <> 'task' or member_of is null or state <> 'READY') not valid
