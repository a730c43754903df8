-- Statements use the old index under this name until the new index exists.
alter index {schema}.tasks_serial_held rename to tasks_serial_held_before
