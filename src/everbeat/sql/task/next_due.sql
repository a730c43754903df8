-- Milliseconds until the next task of these names and queues becomes due; null when none is scheduled. The margin covers what
-- became due since the claim that found nothing (then the answer is negative).
with recursive lane (queue, priority) as (
    (select queue, priority from {schema}.tasks where state = 'PENDING' order by queue, priority limit 1)
    union all
    select next_lane.queue, next_lane.priority
    from lane
    cross join lateral (
        select t.queue, t.priority from {schema}.tasks t
        where t.state = 'PENDING' and (t.queue, t.priority) > (lane.queue, lane.priority)
        order by t.queue, t.priority limit 1
    ) next_lane
)
select extract(epoch from min(head.enqueued_at) - statement_timestamp()) * 1000 as due_in_ms
from lane
cross join lateral (
    select t.enqueued_at from {schema}.tasks t
    where t.state = 'PENDING' and t.queue = lane.queue and t.priority = lane.priority
      and t.enqueued_at > statement_timestamp() - %(margin_ms)s::bigint * interval '1 millisecond' and t.name = any(%(names)s::text[])
    order by t.enqueued_at limit 1
) head
where %(queues)s::text[] is null or lane.queue = any(%(queues)s::text[])
