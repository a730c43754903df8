-- Sum up the rates of one span that ended long enough ago, by queue and of all queues. Of the lengths that have such a span, the longest comes
-- first. Spans of one length are summed in the order of time. The first one is that of the first rates, or the first that is kept. Return
-- whether there was such a span. A session that sums the same span at the same time finds the same counts, because no supervisor
-- writes a minute after five minutes. So its rows are not inserted again. The primary keys of both tables serve the statement.
with level as materialized (
    select
        l.seconds, l.seconds * interval '1 second' as length, l.settled_s * interval '1 second' as settled,
        date_bin(l.seconds * interval '1 second', statement_timestamp() - l.kept_s * interval '1 second', timestamptz '2000-01-01 00:00+00') as first_kept,
        (select s.at from {schema}.rate_sums s where s.seconds = l.seconds and s.is_total order by s.at desc limit 1) as last_summed
    from unnest(%(levels)s::integer[], %(kept_s)s::integer[], %(settled_s)s::integer[]) l (seconds, kept_s, settled_s)
), counted as materialized (
    select least(
        (select r.at from {schema}.rates r where r.seconds = 60 order by r.at limit 1),
        (select r.at from {schema}.rates r where r.seconds = 3600 order by r.at limit 1)
    ) as since
), span as materialized (
    select x.seconds, x.at, x.at + x.length as until
    from (
        select
            l.seconds, l.length, l.settled,
            greatest(l.first_kept, coalesce(l.last_summed + l.length, date_bin(l.length, c.since, timestamptz '2000-01-01 00:00+00'))) as at
        from level l
        cross join counted c
        where c.since is not null or l.last_summed is not null
    ) x
    where x.at + x.length + x.settled <= statement_timestamp()
    order by x.seconds desc
    limit 1
), added as (
    insert into {schema}.rate_sums (
        seconds, is_total, at, queue, started, completed, failed, retried, cancelled, suspended, released, crashed, lost, expired, wait_s,
        run_s, waits, runs
    )
    select
        p.seconds, x.is_total, p.at, coalesce(x.queue, ''), coalesce(x.started, 0), coalesce(x.completed, 0), coalesce(x.failed, 0),
        coalesce(x.retried, 0), coalesce(x.cancelled, 0), coalesce(x.suspended, 0), coalesce(x.released, 0), coalesce(x.crashed, 0),
        coalesce(x.lost, 0), coalesce(x.expired, 0), coalesce(x.wait_s, 0), coalesce(x.run_s, 0),
        case when x.started is null then array_fill(0::bigint, array[24]) else x.waits end,
        case when x.started is null then array_fill(0::bigint, array[24]) else x.runs end
    from span p
    cross join lateral (
        select grouping(r.queue) = 1 as is_total, r.queue, {fragment/summed_rates}
        from {schema}.rates r
        where r.seconds in (60, 3600) and r.at >= p.at and r.at < p.until
        group by grouping sets ((r.queue), ())
    ) x
    order by x.is_total, x.queue
    on conflict (seconds, is_total, at, queue) do nothing
)
select exists (select from span) as is_summed
