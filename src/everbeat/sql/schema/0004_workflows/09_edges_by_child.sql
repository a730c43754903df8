-- Whether a node still waits for any of its parents is one look into this index.
create index edges_by_child on {schema}.edges (workflow_id, child, state)
