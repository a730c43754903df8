-- Whether anything of a workflow, or of a map, has not ended yet is one look into this index.
create index nodes_open on {schema}.nodes (workflow_id, member_of) where state in ('PENDING', 'READY', 'ENQUEUED')
