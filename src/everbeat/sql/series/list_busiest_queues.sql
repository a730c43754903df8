-- List the queues whose attempts started most often between two times, with their counts, at most `limit` of them. Only of these queues, the
-- histograms are added up. Sums count as far as they reach, and rates after them. The offsets keep the planner from reading all sums.
-- rate_sums_started and the primary keys of `rate_sums` and `rates` serve the statement.
with recursive {fragment/rate_spans}, busy as materialized (
    select x.queue, sum(x.started) as started
    from (
        select f.queue, f.started
        from covered c
        cross join lateral (
            select s.queue, s.started
            from {schema}.rate_sums s
            where s.seconds = c.seconds and not s.is_total and s.at >= c.since and s.at < c.until
            offset 0
        ) f
        union all
        select r.queue, r.started
        from {schema}.rates r
        where r.seconds in (60, 3600) and r.at >= (select max(c.until) from covered c) and r.at < %(until)s
    ) x
    group by x.queue
    order by started desc, x.queue
    limit %(limit)s
)
select %(since)s::timestamptz as at, r.queue, null::text as name, {fragment/summed_rates}
from (
    select f.*
    from covered c
    cross join lateral (
        select
            s.queue, s.started, s.completed, s.failed, s.retried, s.cancelled, s.suspended, s.released, s.crashed, s.lost, s.expired, s.wait_s,
            s.run_s, s.waits, s.runs
        from {schema}.rate_sums s
        where s.seconds = c.seconds and not s.is_total and s.at >= c.since and s.at < c.until
          and s.queue = any(array(select b.queue from busy b))
        offset 0
    ) f
    union all
    select
        x.queue, x.started, x.completed, x.failed, x.retried, x.cancelled, x.suspended, x.released, x.crashed, x.lost, x.expired, x.wait_s,
        x.run_s, x.waits, x.runs
    from {schema}.rates x
    where x.seconds in (60, 3600) and x.at >= (select max(c.until) from covered c) and x.at < %(until)s
      and x.queue = any(array(select b.queue from busy b))
) r
group by r.queue
order by started desc, r.queue
