-- List the largest counts of each span of `bucket_s` seconds, by queue, in the order of time. A queue without live tasks at the times of all
-- samples has no row. depths_by_time serves the statement.
select
    date_bin(%(bucket_s)s * interval '1 second', d.at, timestamptz '2000-01-01 00:00+00') as bucket, d.queue, max(d.due) as due,
    max(d.scheduled) as scheduled, max(d.suspended) as suspended, max(d.claimed) as claimed, max(d.running) as running,
    max(d.oldest_due_s) as oldest_due_s,
    array_remove(array[
        case when bool_or('due' = any(d.at_least)) then 'due' end, case when bool_or('scheduled' = any(d.at_least)) then 'scheduled' end,
        case when bool_or('suspended' = any(d.at_least)) then 'suspended' end, case when bool_or('claimed' = any(d.at_least)) then 'claimed' end,
        case when bool_or('running' = any(d.at_least)) then 'running' end
    ], null) as at_least
from {schema}.depths d
where d.seconds in (10, 60, 3600) and d.at >= %(since)s and d.at < %(until)s and d.queue is not null
  and (%(queue)s::text is null or d.queue = %(queue)s)
group by 1, d.queue
order by bucket, d.queue
