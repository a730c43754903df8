-- Decide whether an edge with `if_failed` is met: OPEN -> MET | UNMET. Code of older versions closes such an edge like any other, and would run
-- the node that handles a failure after a success. So this is a trigger. The statement that closes the edge also writes the end of its parent,
-- before or after it. Until then, the state of the parent's task or child decides, as in workflow/record_ended_nodes.
create function {schema}.judge_handled_failure() returns trigger language plpgsql as $$
declare
    v_came_to text;
begin
    select
        case
            when n.state not in ('PENDING', 'READY', 'ENQUEUED') then n.state
            when n.kind = 'workflow' then coalesce(w.state, 'FAILED')
            when t.id is null or (t.state = 'COMPLETED' and t.result is null) then 'FAILED'
            else t.state
        end
    into v_came_to
    from {schema}.nodes n
    left join {schema}.tasks t on n.kind = 'task' and t.id = n.task_id
    left join {schema}.workflows w on n.kind = 'workflow' and w.id = n.task_id
    where n.workflow_id = new.workflow_id and n.number = new.parent;
    new.state := case when v_came_to in ('FAILED', 'CANCELLED', 'EXPIRED') then 'MET' else 'UNMET' end;
    return new;
end
$$
