-- List the largest numbers of due tasks of the given queues in each span of `bucket_s` seconds. Samples of the given lengths count.
-- depths_by_time serves the statement.
select
    d.queue, date_bin(%(bucket_s)s * interval '1 second', d.at, timestamptz '2000-01-01 00:00+00') as bucket, max(d.due) as due
from {schema}.depths d
where d.seconds = any(%(seconds)s::int[]) and d.at >= %(since)s and d.at < %(until)s and d.queue = any(%(queues)s::text[])
group by 1, 2
order by 1, 2
