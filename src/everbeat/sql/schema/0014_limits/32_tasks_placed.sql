-- Put each new task with gates into its line. For a task without gates, this trigger costs only the comparison of one column. There is no such
-- trigger for updates, because PostgreSQL would lock each row of every update once more.
create trigger tasks_placed before insert on {schema}.tasks
    for each row when (new.gates is not null)
    execute function {schema}.place_sent_task()
