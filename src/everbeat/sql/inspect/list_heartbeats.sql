-- List the latest heartbeat of every running task, newest first. The statement reads the leases rather than the history, so each task has
-- one row.
select
    l.id as task_id, l.worker_id as sender_id, case when l.state = 'RUNNING' then 'runner' else 'claimer' end as role,
    l.last_beat_at as sent_at, l.hostname, l.pid, l.supervisor_id
from {schema}.leases l
order by l.last_beat_at desc, l.id
limit %(limit)s
