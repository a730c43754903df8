-- List the names of a workflow's nodes.
select n.name from {schema}.nodes n where n.workflow_id = %(id)s order by n.number limit 1000
