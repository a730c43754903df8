-- The children of a workflow.
create index workflows_by_parent on {schema}.workflows (parent_id) where parent_id is not null
