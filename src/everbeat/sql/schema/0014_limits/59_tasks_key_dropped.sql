-- For a task without such a key, this trigger costs only the comparison of one column.
create or replace trigger tasks_key_dropped after delete on {schema}.tasks
    for each row
    when (old.unique_key is not null)
    execute function {schema}.drop_key()
