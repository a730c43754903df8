-- List how many attempts and tasks of the given queues ended in each span of `bucket_s` seconds. Sums count as far as they reach, and rates
-- after them. The offset keeps the planner from reading all sums. The primary keys of `rate_sums` and `rates` serve the statement.
with recursive {fragment/rate_spans}
select r.queue, date_bin(%(bucket_s)s * interval '1 second', r.at, timestamptz '2000-01-01 00:00+00') as bucket, sum(r.ended)::bigint as ended
from (
    select f.*
    from covered c
    cross join lateral (
        select s.queue, s.at, s.completed + s.failed + s.retried + s.cancelled + s.crashed + s.lost + s.expired as ended
        from {schema}.rate_sums s
        where s.seconds = c.seconds and not s.is_total and s.at >= c.since and s.at < c.until and s.queue = any(%(queues)s::text[])
        offset 0
    ) f
    union all
    select x.queue, x.at, x.completed + x.failed + x.retried + x.cancelled + x.crashed + x.lost + x.expired
    from {schema}.rates x
    where x.seconds in (60, 3600) and x.at >= (select max(c.until) from covered c) and x.at < %(until)s and x.queue = any(%(queues)s::text[])
) r
group by 1, 2
order by 1, 2
