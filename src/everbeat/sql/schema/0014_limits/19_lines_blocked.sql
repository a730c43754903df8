-- The lines that wait for a gate, in the order in which they continue.
create index {concurrently} lines_blocked on {schema}.lines (blocked, priority, turn) where state = 'B'
