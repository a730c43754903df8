-- Record the end of a workflow's task in the outbox, in the transaction that ends the task.
create function {schema}.task_ended() returns trigger language plpgsql as $$
begin
    insert into {schema}.outbox (workflow_id, node) values (new.workflow_id, new.node);
    return null;
end
$$
