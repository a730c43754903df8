-- Without tasks, no permit is held.
create trigger tasks_truncated after truncate on {schema}.tasks
    for each statement
    execute function {schema}.clear_lines()
