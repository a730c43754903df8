-- The queues that have unpublished messages, found with one index descent per queue.
queue (name) as (
    (select o.queue from {schema}.message_outbox o where o.place is null order by o.queue limit 1)
    union all
    select further.queue
    from queue q
    cross join lateral (
        select o.queue from {schema}.message_outbox o where o.place is null and o.queue > q.name order by o.queue limit 1
    ) further
)
