-- List how many attempts and tasks of the given queues ended in each span of `bucket_s` seconds. The primary key of `rates` serves the statement.
select
    r.queue, date_bin(%(bucket_s)s * interval '1 second', r.at, timestamptz '2000-01-01 00:00+00') as bucket,
    sum(r.completed + r.failed + r.retried + r.cancelled + r.crashed + r.lost + r.expired)::bigint as ended
from {schema}.rates r
where r.seconds in (60, 3600) and r.at >= %(since)s and r.at < %(until)s and r.queue = any(%(queues)s::text[])
group by 1, 2
order by 1, 2
