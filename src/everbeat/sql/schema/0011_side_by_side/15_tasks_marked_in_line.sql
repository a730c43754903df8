-- What marked tasks of serial lines need. A claim finds these tasks at the heads of their lines; workers learn here what they need.
create index {concurrently} tasks_marked_in_line on {schema}.tasks (needs_id)
    where state = 'PENDING' and serial is not null and needs_id is not null
