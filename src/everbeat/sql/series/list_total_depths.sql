-- List the largest counts of live tasks in each span of `bucket_s` seconds, in the order of time. They are those of one queue or of all queues.
-- Samples of the given lengths count. The counts of a sample are added up first, so two queues that were full at different times do not add up.
-- The row about the tables shows that a sample was taken, also if no queue had a live task. depths_by_time serves the statement.
select
    date_bin(%(bucket_s)s * interval '1 second', s.at, timestamptz '2000-01-01 00:00+00') as bucket, coalesce(%(queue)s::text, '') as queue,
    max(s.due) as due, max(s.scheduled) as scheduled, max(s.suspended) as suspended, max(s.claimed) as claimed, max(s.running) as running,
    max(s.oldest_due_s) as oldest_due_s, case when bool_or(s.is_bound) then array['due'] else '{{}}'::text[] end as at_least
from (
    select
        d.at, coalesce(sum(d.due), 0)::bigint as due, coalesce(sum(d.scheduled), 0)::bigint as scheduled,
        coalesce(sum(d.suspended), 0)::bigint as suspended, coalesce(sum(d.claimed), 0)::bigint as claimed,
        coalesce(sum(d.running), 0)::bigint as running, max(d.oldest_due_s) as oldest_due_s, coalesce(bool_or(cardinality(d.at_least) > 0), false) as is_bound
    from {schema}.depths d
    where d.seconds = any(%(seconds)s::int[]) and d.at >= %(since)s and d.at < %(until)s
      and (%(queue)s::text is null or d.queue is null or d.queue = %(queue)s)
    group by d.at
) s
group by 1
order by bucket
