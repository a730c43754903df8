-- Put each new task with gates into its line. For a task without gates, this trigger costs only the comparison of one column. Updates
-- have no such trigger, because PostgreSQL would lock each row once more.
create trigger tasks_placed before insert on {schema}.tasks
    for each row when (new.gates is not null)
    execute function {schema}.place_sent_task()
