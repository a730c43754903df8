-- List the queues that have messages to publish or messages in the stream.
with recursive waiting (name) as (
    (select o.queue from {schema}.message_outbox o where o.place is null order by o.queue limit 1)
    union all
    select further.queue
    from waiting q
    cross join lateral (
        select o.queue from {schema}.message_outbox o where o.place is null and o.queue > q.name order by o.queue limit 1
    ) further
), lying (name) as (
    (select o.queue from {schema}.message_outbox o where o.place is not null order by o.queue limit 1)
    union all
    select further.queue
    from lying q
    cross join lateral (
        select o.queue from {schema}.message_outbox o where o.place is not null and o.queue > q.name order by o.queue limit 1
    ) further
)
select name from waiting union select name from lying order by name
