-- The lines from which a claim can take tasks. A worker never reads lines whose first task it cannot run.
create index {concurrently} lines_ready on {schema}.lines (suspect, reader, queue, priority, turn) where state = 'R'
