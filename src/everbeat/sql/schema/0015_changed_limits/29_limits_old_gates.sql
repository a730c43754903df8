-- The limits whose gates have to be compared with them.
create index {concurrently} limits_old_gates on {schema}.limits (name) where has_old_gates
