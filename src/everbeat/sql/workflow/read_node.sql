-- Return one node of a workflow by name.
select n.number, n.state, n.kind from {schema}.nodes n where n.workflow_id = %(id)s and n.name = %(name)s
