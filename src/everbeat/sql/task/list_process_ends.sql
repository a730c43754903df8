-- List why processes exited while they were running these tasks, as seen by a supervisor or a worker. Only exits since an operator's last
-- retry of the task are listed.
select r.task_id, r.cause
from {schema}.recoveries r
join {schema}.tasks t on t.id = r.task_id
where r.task_id = any(%(ids)s::uuid[]) and r.was = 'RUNNING' and r.noticed_by = 'child_exit' and r.attempt > t.counted_from
