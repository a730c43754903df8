-- The heartbeats of one task in flight that history still has, newest first; of a claim and a start in one moment the start.
select h.task_id, h.sender_id, h.role, h.sent_at, h.hostname, h.pid, h.supervisor_id
from {schema}.heartbeats h
where h.task_id = %(id)s
order by h.sent_at desc, h.role desc
limit %(limit)s
