-- The heartbeats of one task in flight that history still has, newest first.
select h.task_id, h.sender_id, h.role, h.sent_at, h.hostname, h.pid, h.supervisor_id
from {schema}.heartbeats h
where h.task_id = %(id)s
order by h.sent_at desc
limit %(limit)s
