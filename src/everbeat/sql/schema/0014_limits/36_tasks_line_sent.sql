-- Note each task that is sent into a line. For other tasks, this trigger costs only the comparison of one column.
create trigger tasks_line_sent after insert on {schema}.tasks
    for each row when (new.serial is not null and new.state = 'PENDING')
    execute function {schema}.note_line_change()
