-- Finds in one index lookup whether a node is still waiting for a parent.
create index edges_by_child on {schema}.edges (workflow_id, child, state)
