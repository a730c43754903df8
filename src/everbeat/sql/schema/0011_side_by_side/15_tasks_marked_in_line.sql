-- The needs of marked tasks in serial lines. A claim finds these tasks at the heads of their lines; workers read their needs here.
create index {concurrently} tasks_marked_in_line on {schema}.tasks (needs_id)
    where state = 'PENDING' and serial is not null and needs_id is not null
