-- List the heartbeats of one running task that are still in the history, newest first. If a claim and a start happened at the same time,
-- the start comes first.
select h.task_id, h.sender_id, h.role, h.sent_at, h.hostname, h.pid, h.supervisor_id
from {schema}.heartbeats h
where h.task_id = %(id)s
order by h.sent_at desc, h.role desc
limit %(limit)s
