-- Note the end of each lease in a line, and each change of a waiting task that can change its line. The claim writes the start of a lease
-- itself. For a task outside of lines, this trigger costs only the comparison of three columns.
create or replace trigger tasks_line_changed after update on {schema}.tasks
    for each row when (
        (old.serial is not null or new.serial is not null or new.gates is not null) and new.state not in ('CLAIMED', 'RUNNING') and (
            old.state in ('CLAIMED', 'RUNNING') or old.state <> new.state or new.state = 'PENDING' and (
                old.enqueued_at <> new.enqueued_at or old.serial_at is distinct from new.serial_at or old.serial is distinct from new.serial
                or old.needs_id is distinct from new.needs_id or old.suspect <> new.suspect or old.queue <> new.queue
                or old.priority <> new.priority or old.name <> new.name or old.gates is distinct from new.gates
                or old.costs is distinct from new.costs or old.good_until is distinct from new.good_until
            )
        )
    )
    execute function {schema}.note_line_change()
