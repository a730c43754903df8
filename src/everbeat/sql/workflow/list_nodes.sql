-- List a page of a workflow's nodes, in order, with the state of their tasks. `history` is
-- read only for tasks that are not in `tasks`.
select
    n.number, n.name, n.kind, n.state, n.task, n.task_id, n.member_of, n.members, n.quorum, n.iteration, n.enqueued_at, n.ended_at,
    coalesce(n.error, t.error, m.error, w.error)::text as error, coalesce(t.state, m.state) as task_state,
    coalesce(t.started_at, m.started_at) as started_at, coalesce(t.attempt, m.attempt) as attempt, w.name as child_name, w.state as child_state,
    t.waits_for, case when t.state = 'PENDING' then t.wake_at end as wake_at
from {schema}.nodes n
left join {schema}.tasks t on n.kind = 'task' and t.id = n.task_id
left join lateral (
    select h.state, h.error, h.started_at, h.attempt from {schema}.history h where t.id is null and n.kind = 'task' and h.id = n.task_id offset 0
) m on true
left join {schema}.workflows w on n.kind = 'workflow' and w.id = n.task_id
where n.workflow_id = %(id)s and n.number > %(after)s
order by n.number
limit %(limit)s
