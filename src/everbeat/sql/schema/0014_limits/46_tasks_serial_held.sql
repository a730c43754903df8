-- At most one task of a strict line is leased, even if a claim is wrong about the head of the line.
create unique index {concurrently} tasks_serial_held on {schema}.tasks (serial)
    where serial is not null and state in ('CLAIMED', 'RUNNING') and not starts_with(serial, 'limit:')
