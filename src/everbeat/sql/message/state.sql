-- Who publishes, and how far behind that is, of queues of which fewer than `window` messages are out; counts stop at 10,000. No row where
-- messages were never asked for.
with recursive queue (name) as (
    (select o.queue from {schema}.message_outbox o where o.place is null order by o.queue limit 1)
    union all
    select further.queue
    from queue q
    cross join lateral (
        select o.queue from {schema}.message_outbox o where o.place is null and o.queue > q.name order by o.queue limit 1
    ) further
), open as materialized (
    select q.name from queue q
    where (select count(*) from (
        select from {schema}.message_outbox o where o.place is not null and o.queue = q.name limit %(window)s
    ) lying) < %(window)s
      and not exists (select from {schema}.pauses p where p.kind = 'queue' and p.name = q.name)
), behind as materialized (
    select o.due_at from open
    cross join lateral (
        select o.due_at from {schema}.message_outbox o
        where o.place is null and o.queue = open.name and o.due_at <= statement_timestamp() order by o.due_at limit 10000
    ) o
    limit 10000
)
select
    case when r.taken_until > statement_timestamp() then r.holder end as holder,
    (select count(*) from behind)::integer as waiting,
    (select extract(epoch from statement_timestamp() - min({schema}.plausible(b.due_at))) from behind b)::float8 as oldest_s,
    r.failing
from {schema}.relay r where r.in_use
