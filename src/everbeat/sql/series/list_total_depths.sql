-- List the largest counts of live tasks in each span of `bucket_s` seconds, in the order of time. They are those of one queue or of all queues.
-- Peaks count as far as they reach, and after them the samples of the given lengths. The counts of a sample are added up first, so two queues
-- that were full at different times do not add up. The row about the tables shows that a sample was taken, also if no queue had a live
-- task. The offset keeps the planner from reading the whole table of peaks. The primary key of `depth_peaks` and depths_by_time serve the statement.
with recursive {fragment/peak_spans}
select
    date_bin(%(bucket_s)s * interval '1 second', s.at, timestamptz '2000-01-01 00:00+00') as bucket, coalesce(%(queue)s::text, '') as queue,
    max(s.due) as due, max(s.scheduled) as scheduled, max(s.suspended) as suspended, max(s.claimed) as claimed, max(s.running) as running,
    max(s.oldest_due_s) as oldest_due_s, case when bool_or(s.is_bound) then array['due'] else '{{}}'::text[] end as at_least
from (
    select
        f.at, coalesce(f.due, 0) as due, coalesce(f.scheduled, 0) as scheduled, coalesce(f.suspended, 0) as suspended,
        coalesce(f.claimed, 0) as claimed, coalesce(f.running, 0) as running, f.oldest_due_s, coalesce(f.at_least, false) as is_bound
    from covered c
    cross join lateral (
        select p.at, q.due, q.scheduled, q.suspended, q.claimed, q.running, q.oldest_due_s, q.at_least
        from {schema}.depth_peaks p
        left join {schema}.depth_peaks q on q.seconds = p.seconds and q.is_total = (%(queue)s::text is null) and q.at = p.at
            and q.queue = coalesce(%(queue)s::text, '')
        where p.seconds = c.seconds and p.is_total and p.at >= c.since and p.at < c.until and p.due is not null
        offset 0
    ) f
    union all
    select
        d.at, coalesce(sum(d.due), 0)::bigint as due, coalesce(sum(d.scheduled), 0)::bigint as scheduled,
        coalesce(sum(d.suspended), 0)::bigint as suspended, coalesce(sum(d.claimed), 0)::bigint as claimed,
        coalesce(sum(d.running), 0)::bigint as running, max(d.oldest_due_s) as oldest_due_s, coalesce(bool_or(cardinality(d.at_least) > 0), false) as is_bound
    from {schema}.depths d
    where d.seconds = any(%(seconds)s::int[]) and d.at >= (select max(c.until) from covered c) and d.at < %(until)s
      and (%(queue)s::text is null or d.queue is null or d.queue = %(queue)s)
    group by d.at
) s
group by 1
order by bucket
