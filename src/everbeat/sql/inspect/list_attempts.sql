-- List the ended attempts of one task, oldest first.
select a.attempt, a.claim_id, a.fence, a.worker_id, a.claimed_at, a.started_at, a.ended_at, a.outcome, a.will_retry, a.error::text
from {schema}.attempts a
where a.task_id = %(id)s
order by a.attempt
