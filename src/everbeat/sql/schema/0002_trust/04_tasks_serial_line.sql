-- Serial lines, each in its order: the head of a line is its first live task, whatever that waits for.
create index tasks_serial_line on {schema}.tasks (serial, serial_at, id)
    where serial is not null and state in ('PENDING', 'CLAIMED', 'RUNNING')
