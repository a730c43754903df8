-- Statements use the old index under this name until the new index exists.
alter index {schema}.tasks_leased rename to tasks_leased_before
