-- List tasks by their latest event, newest first. A page ends where the next one begins (`before`). The filters are those of
-- inspect/list_tasks. No index has this order, because it would slow down every claim, start and end of a task. Instead, the statement
-- sorts a limited number of rows: the newest matching tasks, all tasks in flight, and the latest failures.
with events as not materialized (
    select t.id, t.state, t.failed_at, event.at
    from {fragment/tasks_with_last_event}
    where {fragment/task_filters}
), looked as materialized (
    (select e.id, e.at from events e order by e.id desc limit %(most)s)
    union
    (select e.id, e.at from events e where e.state in ('CLAIMED', 'RUNNING'))
    union
    (select e.id, e.at from events e where e.state = 'FAILED' order by e.failed_at desc limit %(most)s)
), page as materialized (
    select l.id, l.at
    from looked l
    where %(before)s::uuid is null or (l.at, l.id) < (
        select event.at, t.id from {fragment/tasks_with_last_event} where t.id = %(before)s
    )
    order by l.at desc, l.id desc
    limit %(limit)s
)
select {fragment/task_columns}
from page event
join {schema}.all_tasks t on t.id = event.id
order by event.at desc, event.id desc
