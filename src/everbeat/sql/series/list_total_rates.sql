-- List the counts of each span of `bucket_s` seconds, of one queue or of all queues together, in the order of time. Sums count as far as they
-- reach, and rates after them. The offset keeps the planner from reading all sums. The primary keys of `rate_sums` and `rates` serve the statement.
with recursive {fragment/rate_spans}
select
    date_bin(%(bucket_s)s * interval '1 second', r.at, timestamptz '2000-01-01 00:00+00') as bucket, %(queue)s::text as of_queue, null::text as of_name,
    {fragment/summed_rates}
from (
    select f.*
    from covered c
    cross join lateral (
        select
            s.at, s.started, s.completed, s.failed, s.retried, s.cancelled, s.suspended, s.released, s.crashed, s.lost, s.expired, s.wait_s,
            s.run_s, s.waits, s.runs
        from {schema}.rate_sums s
        where s.seconds = c.seconds and s.is_total = (%(queue)s::text is null) and s.at >= c.since and s.at < c.until
          and s.queue = coalesce(%(queue)s::text, '')
        offset 0
    ) f
    union all
    select
        x.at, x.started, x.completed, x.failed, x.retried, x.cancelled, x.suspended, x.released, x.crashed, x.lost, x.expired, x.wait_s,
        x.run_s, x.waits, x.runs
    from {schema}.rates x
    where x.seconds in (60, 3600) and x.at >= (select max(c.until) from covered c) and x.at < %(until)s
      and (%(queue)s::text is null or x.queue = %(queue)s)
) r
group by 1
order by bucket
