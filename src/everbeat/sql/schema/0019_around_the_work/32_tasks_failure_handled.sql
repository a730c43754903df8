-- For a task without a failure handler, this trigger costs only the comparison of its state, unless the task fails for good.
create or replace trigger tasks_failure_handled after update of state on {schema}.tasks
    for each row
    when (
        new.state in ('FAILED', 'EXPIRED') and old.state is distinct from new.state and position('"on_failure"' in new.policy::text) > 0
    )
    execute function {schema}.send_failure_handler()
