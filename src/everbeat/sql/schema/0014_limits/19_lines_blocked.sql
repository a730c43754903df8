-- The lines that wait for a gate, in the order in which they continue.
create index lines_blocked on {schema}.lines (blocked, priority, turn) where state = 'B'
