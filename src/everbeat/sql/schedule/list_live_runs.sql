-- List the runs of a schedule that have not ended, oldest first.
select t.id, t.state, t.tick, t.sent_at, t.started_at, t.attempt, case when t.state <> 'PENDING' then t.claimed_by_worker_id end
from {schema}.tasks t
where t.schedule = %(name)s and t.state in ('PENDING', 'CLAIMED', 'RUNNING')
order by t.sent_at, t.id
limit %(limit)s
