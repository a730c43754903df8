-- Put each new task with gates into its line, but not a task that has ended and that a retry moves back from `history`.
create or replace trigger tasks_placed before insert on {schema}.tasks
    for each row when (new.gates is not null and new.state not in ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED'))
    execute function {schema}.place_sent_task()
