-- The causes with which processes ended under the code of these tasks, as far as a supervisor or worker saw them end, since each task was
-- last retried by hand.
select r.task_id, r.cause
from {schema}.recoveries r
join {schema}.tasks t on t.id = r.task_id
where r.task_id = any(%(ids)s::uuid[]) and r.was = 'RUNNING' and r.noticed_by = 'child_exit' and r.attempt > t.counted_from
