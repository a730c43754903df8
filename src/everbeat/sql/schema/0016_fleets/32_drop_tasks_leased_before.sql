-- Replaced by an index that begins with the same column, which serves the same statements.
drop index {concurrently} {schema}.tasks_leased_before
