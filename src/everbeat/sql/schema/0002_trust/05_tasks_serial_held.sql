-- At most one task of a serial line is held, whatever a claim believes to be its head.
create unique index tasks_serial_held on {schema}.tasks (serial)
    where serial is not null and state in ('CLAIMED', 'RUNNING')
