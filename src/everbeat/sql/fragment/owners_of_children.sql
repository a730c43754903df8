-- The task `id`, and the earlier tasks of its node whose children it has taken over. When a workflow is retried, its nodes get new tasks.
-- If a node's earlier task did not complete, the new task continues from the earlier task's steps and owns its children. So an earlier task is an
-- owner if the steps of this task name one of its children, or a gather with live children.
owner (id) as materialized (
    select %(id)s::uuid
    union
    select p.id
    from {schema}.tasks o
    join {schema}.steps s on s.task_id = o.id and s.kind = 'child'
    left join {schema}.all_tasks c on c.id = (s.result #>> '{{}}')::uuid
    left join {schema}.workflows f on f.id = (s.result #>> '{{}}')::uuid
    left join {schema}.tasks g on g.batch_id = (s.result #>> '{{}}')::uuid and g.state in ('PENDING', 'CLAIMED', 'RUNNING')
    join {schema}.tasks p on p.id = coalesce(c.parent_id, f.parent_task_id, g.parent_id) and p.workflow_id = o.workflow_id and p.node = o.node
    where o.id = %(id)s and o.workflow_id is not null
)
