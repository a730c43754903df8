-- Return the ids of the last workflow that a list of workflows examines and of the workflow after it, if there are any. A list examines at most
-- `most` workflows. The primary key, or workflows_live for those that have not ended, serves it.
select x.id
from {schema}.workflows x
where {fragment/workflow_scope}
order by x.id desc
offset %(most)s - 1
limit 2
