-- The PENDING tasks of each line, in the order of the line. A claim reads this index only from the head of one line at a time.
create index {concurrently} tasks_line on {schema}.tasks (serial, serial_at, id) where state = 'PENDING' and serial is not null
