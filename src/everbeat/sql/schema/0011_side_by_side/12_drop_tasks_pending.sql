-- Replaced by an index that leaves out marked tasks.
drop index {schema}.tasks_pending
