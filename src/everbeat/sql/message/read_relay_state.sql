-- Return which worker is publishing, and the backlog of queues with fewer than `window` messages in the stream. Counts stop at 10,000.
-- Return no row if messages have never been enabled.
with recursive {fragment/queues_of_messages}, open as materialized (
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
