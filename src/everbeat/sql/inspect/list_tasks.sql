-- List tasks, newest id first. The statement examines at most `most` tasks (null: all), so it also ends soon if few tasks match. The ids of a
-- workflow's tasks begin like the workflow's id, so they lie between first_id and last_id. A worker matches if it holds or has held the task, or if
-- it ran one of the task's attempts. An error can be given as a code, a class, or a class without its module.
select {fragment/task_columns}
from (
    select t.* from {schema}.all_tasks t
    where {fragment/task_scope} and ({fragment/live_states})
    order by t.id desc
    limit %(most)s
) t
{fragment/last_event}
where {fragment/task_filters}
order by t.id desc
limit %(limit)s
