-- Return the questions of a task, the latest first, with their answers. question/hold_task has locked the task. A row without a question: it has
-- not asked. The primary key of the steps and the index of signals by target serve the lookups.
select t.state, s.name as event, s.state as wait_state, s.result::text as asked, g.id as answer_id, g.value::text as answer, g.sent_at
from {schema}.tasks t
left join lateral (
    select x.name, x.state, x.result, x.begun_at from {schema}.steps x
    where x.task_id = t.id and x.kind = 'event' and starts_with(x.name, 'answer/')
      and (%(event)s::text is null or x.name = %(event)s::text)
    order by x.begun_at desc, x.name desc
    limit 1000
) s on true
left join lateral (
    select a.id, a.value, a.sent_at from {schema}.signals a
    where a.target = t.id and a.name = s.name
    order by a.sent_at, a.id limit 1
) g on true
where t.id = %(id)s
order by s.begun_at desc, s.name desc
