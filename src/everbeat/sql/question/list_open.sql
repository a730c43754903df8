-- Return the open questions of the tasks that wait for an answer: a page of tasks by id. The partial index `tasks_asking` serves the page, and
-- the primary key of the steps finds the questions of a task. A question whose answer is stored, but whose task has not continued yet, is
-- left out.
select t.id, t.name, t.queue, s.name as event, s.result::text as asked, s.begun_at, s.due_at, t.labels::text as labels
from (
    select a.id, a.name, a.queue, a.labels from {schema}.tasks a
    where a.state in ('PENDING', 'CLAIMED', 'RUNNING') and starts_with(a.waits_for, 'answer/') and a.id > %(after)s
    order by a.id
    limit %(limit)s
) t
cross join lateral (
    select x.name, x.result, x.begun_at, x.due_at from {schema}.steps x
    where x.task_id = t.id and x.kind = 'event' and x.state = 'OPEN' and starts_with(x.name, 'answer/')
      and not exists (select from {schema}.signals g where g.target = t.id and g.name = x.name)
    order by x.begun_at, x.name
    limit 100
) s
order by t.id, s.begun_at, s.name
