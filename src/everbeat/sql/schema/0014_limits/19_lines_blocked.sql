-- The lines that wait for a gate, in the order in which they continue. A line whose turn was cut short comes first.
create index {concurrently} lines_blocked on {schema}.lines (blocked, priority, (credit = 0), turn) where state = 'B'
