-- Claims walk the old index under this name until the new one is there.
alter index {schema}.tasks_pending rename to tasks_pending_before
