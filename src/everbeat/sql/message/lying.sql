-- How many messages of each queue the stream holds with reason: those of rows that are out, and those of tasks that a worker holds.
select q.queue, count(*)
from (
    select o.queue from {schema}.message_outbox o where o.place is not null and o.place > 0
    union all
    select t.queue from {schema}.tasks t where t.state in ('CLAIMED', 'RUNNING')
) q
group by q.queue
