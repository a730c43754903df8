-- List the ended attempts of one task, also of a task in `history`, oldest first.
select a.attempt, a.claim_id, a.fence, a.worker_id, a.claimed_at, a.started_at, a.ended_at, a.outcome, a.will_retry, a.error::text
from {schema}.attempts a
where a.task_id = %(id)s
union all
select a.attempt, a.claim_id, a.fence, a.worker_id, a.claimed_at, a.started_at, a.ended_at, a.outcome, a.will_retry, a.error::text
from {schema}.history h
cross join lateral unnest(h.attempts) a
where h.id = %(id)s
order by attempt
