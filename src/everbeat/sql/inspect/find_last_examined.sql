-- Return the ids of the last task that a list of tasks examines and of the task after it, if there are any. A list examines at most `most` tasks.
select t.id
from {schema}.all_tasks t
where {fragment/task_scope} and ({fragment/live_states})
order by t.id desc
offset %(most)s - 1
limit 2
