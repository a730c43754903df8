-- List tasks by their latest event, newest first. A page ends where the next one begins (`before`). The filters are those of
-- inspect/list_tasks. No index has this order, because it would slow down every claim, start and end of a task. Instead, the statement
-- sorts a limited number of rows: the newest tasks, all tasks in flight, and the latest failures. Of the newest tasks and of the failures, it
-- examines at most `most` each (null: all). The tasks of the page are looked up together: so each partition of `history` is read once.
-- The offset keeps the planner from reading the whole range of ids to find the tasks in flight.
with looked as materialized (
    (
        select t.id, event.at
        from (
            select t.* from {schema}.all_tasks t
            where {fragment/task_scope} and ({fragment/live_states}) and t.id >= %(oldest)s
            order by t.id desc
            limit %(most)s
        ) t
        {fragment/last_event}
        where {fragment/task_filters}
        order by t.id desc
        limit %(most_sorted)s
    )
    union
    (
        select t.id, event.at
        from (select t.* from {schema}.all_tasks t where t.state in ('CLAIMED', 'RUNNING') offset 0) t
        {fragment/last_event}
        where {fragment/task_scope} and {fragment/task_filters}
    )
    union
    (
        select t.id, event.at
        from (
            select t.* from {schema}.all_tasks t
            where t.state = 'FAILED' and {fragment/task_scope} and ({fragment/live_states})
            order by t.failed_at desc
            limit %(most_sorted)s
        ) t
        {fragment/last_event}
        where {fragment/task_filters}
    )
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
where t.id = any(array(select p.id from page p))
order by event.at desc, event.id desc
