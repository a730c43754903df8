-- List the edges of a workflow.
select e.parent, e.child, e.joins, e.tolerates, e.path, e.expects, e.state, e.if_failed
from {schema}.edges e where e.workflow_id = %(id)s order by e.parent, e.child, e.number
