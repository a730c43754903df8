-- List failed tasks by their latest event, newest first, as inspect/list_latest_tasks. The statement examines only the latest failures, at most
-- `most`, which tasks_failed and history_failed find. Of each row, `is_complete` says whether these are all failures. There is one row
-- without a task if none matches. The tasks of the page are looked up together: so each partition of `history` is read once.
with examined as materialized (
    select
        t.id, event.at,
        {fragment/task_filters} as is_match
    from (
        select t.* from {schema}.all_tasks t
        where t.state = 'FAILED' and {fragment/task_scope} and ({fragment/live_states})
        order by t.failed_at desc
        limit %(most)s
    ) t
    {fragment/last_event}
), page as materialized (
    select e.id, e.at
    from examined e
    where e.is_match and (%(before)s::uuid is null or (e.at, e.id) < (
        select event.at, t.id from {fragment/tasks_with_last_event} where t.id = %(before)s
    ))
    order by e.at desc, e.id desc
    limit %(limit)s
)
select {fragment/task_columns}, c.is_complete
from (select count(*) < %(most)s as is_complete from examined) c
left join (
    page event join {schema}.all_tasks t on t.id = event.id and t.id = any(array(select p.id from page p))
) on true
order by event.at desc, event.id desc
