-- For a task without a workflow, this trigger costs only the comparison of one column.
create trigger tasks_ended after update of state on {schema}.tasks
    for each row
    when (
        new.workflow_id is not null and new.state in ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED')
        and old.state not in ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED')
    )
    execute function {schema}.task_ended()
