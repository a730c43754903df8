-- Replaced by an index that leaves out lines that are not strict.
drop index {concurrently} {schema}.tasks_serial_held_before
