-- List the largest numbers of due tasks of the given queues in each span of `bucket_s` seconds. Peaks count as far as they reach, and after them
-- the samples of the given lengths. The offset keeps the planner from reading the whole table of peaks. The primary key of `depth_peaks` and
-- depths_by_time serve the statement.
with recursive {fragment/peak_spans}
select x.queue, date_bin(%(bucket_s)s * interval '1 second', x.at, timestamptz '2000-01-01 00:00+00') as bucket, max(x.due) as due
from (
    select f.queue, f.at, f.due
    from covered c
    cross join lateral (
        select p.queue, p.at, p.due
        from {schema}.depth_peaks p
        where p.seconds = c.seconds and not p.is_total and p.at >= c.since and p.at < c.until and p.queue = any(%(queues)s::text[])
        offset 0
    ) f
    union all
    select d.queue, d.at, d.due
    from {schema}.depths d
    where d.seconds = any(%(seconds)s::int[]) and d.at >= (select max(c.until) from covered c) and d.at < %(until)s and d.queue = any(%(queues)s::text[])
) x
group by 1, 2
