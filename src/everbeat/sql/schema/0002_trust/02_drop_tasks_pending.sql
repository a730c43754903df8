-- Replaced by an index that leaves out serial lines.
drop index {schema}.tasks_pending
