-- The events of one workflow.
create index outbox_by_workflow on {schema}.outbox (workflow_id, id)
