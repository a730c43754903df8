-- Count the messages of each queue that the stream should contain: those of published rows, and those of tasks that a worker holds.
select q.queue, count(*) filter (where not q.held) as out, count(*) filter (where q.held) as held
from (
    select o.queue, false as held from {schema}.message_outbox o where o.place is not null and o.place > 0
    union all
    select t.queue, true as held from {schema}.tasks t where t.state in ('CLAIMED', 'RUNNING')
) q
group by q.queue
