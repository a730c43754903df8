-- Replaced by the one that leaves serial lines out.
drop index {schema}.tasks_pending
