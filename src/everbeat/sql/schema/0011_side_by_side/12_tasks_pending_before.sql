-- Claims scan the old index under this name until the new index exists.
alter index {schema}.tasks_pending rename to tasks_pending_before
