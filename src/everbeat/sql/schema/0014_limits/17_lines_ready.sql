-- The lines from which a claim can take tasks. A worker never reads lines whose first task it cannot run. A claim that starts no tasks does
-- not read lines with limits.
create index {concurrently} lines_ready on {schema}.lines (suspect, (gates is not null), reader, queue, priority, turn) where state = 'R'
