-- Nodes whose parents are done and that have not been enqueued yet.
create index nodes_ready on {schema}.nodes (workflow_id, number) where state = 'READY'
