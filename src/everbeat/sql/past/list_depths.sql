-- List the counts of the last sample of all queues before a moment, at most `window_ms` old. depths_by_time serves the statement.
with sampled as materialized (
    select max(last.at) as at
    from unnest(array[10, 60, 3600]) kind (seconds)
    cross join lateral (
        select d.at from {schema}.depths d
        where d.seconds = kind.seconds and d.at <= %(at)s and d.at > %(at)s::timestamptz - %(window_ms)s * interval '1 millisecond'
        order by d.at desc
        limit 1
    ) last
)
select d.at, d.queue, d.due, d.scheduled, d.suspended, d.claimed, d.running, d.oldest_due_s,
    coalesce(d.at_least, '{{}}'::text[]) as at_least
from sampled s
join {schema}.depths d on d.seconds in (10, 60, 3600) and d.at = s.at and d.queue is not null
order by d.oldest_due_s desc nulls last, d.queue
limit %(limit)s
