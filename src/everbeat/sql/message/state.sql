-- Who publishes, and how far behind that is; counts stop at 10,000. No row where messages were never asked for.
select
    case when r.taken_until > statement_timestamp() then r.holder end as holder,
    (select count(*) from (
        select from {schema}.message_outbox o where o.place is null and o.due_at <= statement_timestamp() limit 10000
    ) waiting)::integer as waiting,
    (
        select extract(epoch from statement_timestamp() - min(o.due_at)) from {schema}.message_outbox o
        where o.place is null and o.due_at <= statement_timestamp()
    )::float8 as oldest_s,
    (select count(*) from (select from {schema}.message_outbox o where o.place is not null limit 10000) lying)::integer as lying,
    (select extract(epoch from statement_timestamp() - max(o.published_at)) from {schema}.message_outbox o where o.place is not null)::float8
        as published_s
from {schema}.relay r where r.in_use
