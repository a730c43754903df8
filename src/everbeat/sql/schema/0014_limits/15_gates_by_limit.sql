-- The gates of a limit.
create index {concurrently} gates_by_limit on {schema}.gates (limit_name)
