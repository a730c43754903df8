-- For a task without a batch, this trigger costs only the comparison of one column.
create trigger tasks_ended_in_batch after update of state on {schema}.tasks
    for each row
    when (
        new.batch_id is not null
        and (new.state in ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED')) <> (old.state in ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED'))
    )
    execute function {schema}.note_batch_event()
