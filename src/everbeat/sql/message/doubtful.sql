-- Messages that may have been lost: published longer ago than `older_ms`, of tasks that are PENDING and due and not paused all the same. Oldest
-- first, at most `limit` of each queue.
with recursive queue (name) as (
    (select o.queue from {schema}.message_outbox o where o.place is not null order by o.queue limit 1)
    union all
    select further.queue
    from queue q
    cross join lateral (
        select o.queue from {schema}.message_outbox o where o.place is not null and o.queue > q.name order by o.queue limit 1
    ) further
)
select o.id, o.place, o.task_id
from queue q
cross join lateral (
    select * from {schema}.message_outbox o
    where o.place is not null and o.queue = q.name and o.published_at <= statement_timestamp() - %(older_ms)s * interval '1 millisecond'
    order by o.published_at, o.id limit %(limit)s
) o
cross join lateral (select * from {schema}.tasks t where t.id = o.task_id limit 1) t
where t.state = 'PENDING' and t.fence = o.fence and t.enqueued_at <= statement_timestamp()
  and not exists (
      select from {schema}.pauses p where (p.kind = 'queue' and p.name = t.queue) or (p.kind = 'task' and p.name = t.name)
  )
