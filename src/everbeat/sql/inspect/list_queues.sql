-- List the queues with live tasks. For each queue, return how many tasks are due, scheduled, claimed and running, and how long the oldest
-- due task has been waiting.
select
    t.queue,
    count(*) filter (where t.state = 'PENDING' and t.enqueued_at <= statement_timestamp()) as pending,
    count(*) filter (where t.state = 'PENDING' and t.enqueued_at > statement_timestamp()) as scheduled,
    count(*) filter (where t.state = 'CLAIMED') as claimed,
    count(*) filter (where t.state = 'RUNNING') as running,
    extract(epoch from statement_timestamp() - min({schema}.plausible(t.enqueued_at)) filter (where t.state = 'PENDING' and t.enqueued_at <= statement_timestamp()))::float8 as oldest_due_s
from {schema}.tasks t
where t.state in ('PENDING', 'CLAIMED', 'RUNNING')
group by t.queue
order by t.queue
