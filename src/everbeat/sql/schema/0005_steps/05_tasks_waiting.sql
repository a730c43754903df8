-- The tasks of a workflow that are waiting for an event.
create index tasks_waiting on {schema}.tasks (workflow_id, waits_for) where workflow_id is not null and waits_for is not null
