-- Return the open question whose answer a task waits for, or another one of its open questions. The primary key of the steps serves it.
select t.id, t.name, t.queue, x.name as event, x.result::text as asked, x.begun_at, x.due_at, t.labels::text as labels
from {schema}.tasks t
join {schema}.steps x on x.task_id = t.id and x.kind = 'event' and x.name = coalesce(%(event)s::text, t.waits_for)
where t.id = %(id)s and t.state in ('PENDING', 'CLAIMED', 'RUNNING') and x.state = 'OPEN' and starts_with(x.name, 'answer/')
