-- Finds in one index lookup whether a workflow or a map has open nodes.
create index nodes_open on {schema}.nodes (workflow_id, member_of) where state in ('PENDING', 'READY', 'ENQUEUED')
