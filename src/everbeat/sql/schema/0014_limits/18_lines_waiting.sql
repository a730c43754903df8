-- The lines whose first task becomes due later. A worker never reads lines whose first task it cannot run.
create index {concurrently} lines_waiting on {schema}.lines (reader, at) where state = 'W'
