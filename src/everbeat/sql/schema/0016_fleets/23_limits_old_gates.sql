-- The limits whose gates have to be compared with them. Only early copies of version 15 lack this index.
create index {concurrently} if not exists limits_old_gates on {schema}.limits (name) where has_old_gates
