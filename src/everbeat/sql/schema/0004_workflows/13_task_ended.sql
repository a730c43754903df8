-- Whatever ends a task of a workflow, in the same transaction its end stands in the outbox.
create function {schema}.task_ended() returns trigger language plpgsql as $$
begin
    insert into {schema}.outbox (workflow_id, node) values (new.workflow_id, new.node);
    return null;
end
$$
