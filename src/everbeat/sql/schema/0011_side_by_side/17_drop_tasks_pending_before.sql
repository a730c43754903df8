-- Replaced by an index that leaves out marked tasks.
drop index {concurrently} {schema}.tasks_pending_before
