-- The serial lines, each in its own order. The head of a line is its first live task, even while that task is waiting.
create index tasks_serial_line on {schema}.tasks (serial, serial_at, id)
    where serial is not null and state in ('PENDING', 'CLAIMED', 'RUNNING')
