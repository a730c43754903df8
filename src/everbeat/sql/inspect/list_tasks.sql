-- List tasks, newest id first. A page ends where the next one begins (`before`). The ids of a workflow's tasks begin like the workflow's
-- id, so they lie between first_id and last_id. A worker matches if it holds or has held the task, or if it ran one of the task's attempts.
-- An error can be given as a code, a class, or a class without its module.
select {fragment/task_columns}
from {fragment/tasks_with_last_event}
where {fragment/task_filters}
  and (%(before)s::uuid is null or t.id < %(before)s)
order by t.id desc
limit %(limit)s
