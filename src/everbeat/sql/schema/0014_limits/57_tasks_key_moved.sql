-- For a task without such a key, this trigger costs only the comparison of one column. A kept key stays taken until its task is deleted.
create or replace trigger tasks_key_moved after update of state on {schema}.tasks
    for each row
    when (new.unique_key is not null and new.unique_for <> 'kept' and new.state <> old.state)
    execute function {schema}.move_key()
