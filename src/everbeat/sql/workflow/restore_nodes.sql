-- Restore nodes that others are waiting for but whose rows were deleted: nothing -> FAILED, so that the waiting nodes are resolved. A
-- restored node has no task, so a retry of the workflow leaves it unchanged.
insert into {schema}.nodes (workflow_id, number, name, kind, state, ended_at, error)
select
    n.workflow_id, g.parent, '#' || g.parent, 'task', 'FAILED', statement_timestamp(),
    json_build_object('code', 'RESULT_NOT_AVAILABLE', 'message', 'the row of this node is gone')
from {schema}.nodes n
cross join lateral (
    select e.parent
    from {schema}.edges e
    where e.workflow_id = n.workflow_id and e.child = n.number and e.state = 'OPEN'
      and (select p.number from {schema}.nodes p where p.workflow_id = e.workflow_id and p.number = e.parent) is null
    offset 0
) g
where n.workflow_id = any(%(ids)s::text::uuid[]) and n.state = 'PENDING'
group by n.workflow_id, g.parent
on conflict do nothing
