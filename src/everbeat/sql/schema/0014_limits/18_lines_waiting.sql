-- The lines whose first task becomes due later.
create index lines_waiting on {schema}.lines (at) where state = 'W'
