-- Sum up the rates of the minutes that have ended, by queue and of all queues, so that charts read few rows of supervisors. Minutes that a supervisor
-- could still write, and some before them, are summed again: all that began less than `settle_s` before the last one. The sums are absolute,
-- and counts only grow. So a repeated or late statement changes nothing. Without sums, the first minute is that of the first rates, or the
-- first that is kept. The primary keys of `rates` and `rate_sums` serve the statement.
with first as materialized (
    select coalesce(
        (select s.at - %(settle_s)s * interval '1 second' from {schema}.rate_sums s where s.seconds = 60 and s.is_total order by s.at desc limit 1),
        (select r.at from {schema}.rates r where r.seconds = 60 order by r.at limit 1)
    ) as at
), span as materialized (
    select
        greatest(f.at, date_bin('1 minute', statement_timestamp() - %(kept_s)s * interval '1 second', timestamptz '2000-01-01 00:00+00')) as since,
        date_bin('1 minute', statement_timestamp(), timestamptz '2000-01-01 00:00+00') as until
    from first f
    where f.at is not null
), minute as materialized (
    select m.at from span p cross join lateral generate_series(p.since, p.until - interval '1 minute', interval '1 minute') m (at)
), summed as materialized (
    select grouping(r.queue) = 1 as is_total, r.at, r.queue, {fragment/summed_rates}
    from {schema}.rates r
    where r.seconds = 60 and r.at >= (select p.since from span p) and r.at < (select p.until from span p)
    group by grouping sets ((r.at, r.queue), (r.at))
)
insert into {schema}.rate_sums as s (
    seconds, is_total, at, queue, started, completed, failed, retried, cancelled, suspended, released, crashed, lost, expired, wait_s, run_s,
    waits, runs
)
select
    60, x.is_total, x.at, coalesce(x.queue, ''), x.started, x.completed, x.failed, x.retried, x.cancelled, x.suspended, x.released, x.crashed, x.lost,
    x.expired, x.wait_s, x.run_s, x.waits, x.runs
from (
    select u.* from summed u
    union all
    select true, m.at, '', 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, array_fill(0::bigint, array[24]), array_fill(0::bigint, array[24])
    from minute m
    where not exists (select from summed u where u.is_total and u.at = m.at)
) x
order by x.is_total, x.at, x.queue
on conflict (seconds, is_total, at, queue) do update
set started = excluded.started, completed = excluded.completed, failed = excluded.failed, retried = excluded.retried,
    cancelled = excluded.cancelled, suspended = excluded.suspended, released = excluded.released, crashed = excluded.crashed, lost = excluded.lost,
    expired = excluded.expired, wait_s = excluded.wait_s, run_s = excluded.run_s, waits = excluded.waits, runs = excluded.runs
where excluded.started + excluded.completed + excluded.failed + excluded.retried + excluded.cancelled + excluded.suspended + excluded.released
        + excluded.crashed + excluded.lost + excluded.expired
    > s.started + s.completed + s.failed + s.retried + s.cancelled + s.suspended + s.released + s.crashed + s.lost + s.expired
