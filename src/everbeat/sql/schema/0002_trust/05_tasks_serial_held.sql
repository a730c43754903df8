-- At most one task of a serial line is leased, even if a claim is wrong about the head of the line.
create unique index tasks_serial_held on {schema}.tasks (serial)
    where serial is not null and state in ('CLAIMED', 'RUNNING')
