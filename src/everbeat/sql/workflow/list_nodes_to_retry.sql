-- List the nodes of a workflow that is about to be retried.
select
    n.number, n.name, n.kind, n.state, n.member_of, n.members is not null as has_members, n.items is not null as makes_members,
    n.task is not null as has_task,
    n.state = 'SKIPPED' and n.error is not null and n.error::text ~ '^[{{]"code" ?: ?"(UPSTREAM|MEMBERS)_SKIPPED"' as follows,
    w.id as child, w.state as child_state
from {schema}.nodes n
left join lateral (
    select c.id, c.state from {schema}.workflows c where n.kind = 'workflow' and c.id = n.task_id offset 0
) w on true
where n.workflow_id = %(id)s
order by n.number
