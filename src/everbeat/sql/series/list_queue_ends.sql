-- List how many attempts and tasks of the given queues ended in each span of `bucket_s` seconds. Sums count as far as they reach, and rates
-- after them. The primary keys of `rate_sums` and `rates` serve the statement.
with recursive {fragment/rate_spans}
select r.queue, date_bin(%(bucket_s)s * interval '1 second', r.at, timestamptz '2000-01-01 00:00+00') as bucket, sum(r.ended)::bigint as ended
from (
    select s.queue, s.at, s.completed + s.failed + s.retried + s.cancelled + s.crashed + s.lost + s.expired as ended
    from covered c
    join {schema}.rate_sums s on s.seconds = c.seconds and not s.is_total and s.at >= c.since and s.at < c.until
        and s.queue = any(%(queues)s::text[])
    union all
    select x.queue, x.at, x.completed + x.failed + x.retried + x.cancelled + x.crashed + x.lost + x.expired
    from {schema}.rates x
    where x.seconds in (60, 3600) and x.at >= (select max(c.until) from covered c) and x.at < %(until)s and x.queue = any(%(queues)s::text[])
) r
group by 1, 2
order by 1, 2
