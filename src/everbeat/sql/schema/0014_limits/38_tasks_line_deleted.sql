-- Note each live task of a line that is deleted.
create trigger tasks_line_deleted after delete on {schema}.tasks
    for each row when (old.serial is not null and old.state in ('PENDING', 'CLAIMED', 'RUNNING'))
    execute function {schema}.note_line_change()
