-- Store the largest counts of one span that ended long enough ago, of each queue and of all queues together. Of the lengths that have such a span,
-- the longest comes first. Spans of one length are stored in the order of time. The first one is that of the first sample, or the first
-- that is kept. Return whether there was such a span. The samples of hours and minutes count. Sessions that store the same
-- span at the same time find the same counts. So the rows of the second one are not inserted. depths_by_time and the primary key
-- serve the statement.
with level as materialized (
    select
        l.seconds, l.seconds * interval '1 second' as length,
        date_bin(l.seconds * interval '1 second', statement_timestamp() - l.kept_s * interval '1 second', timestamptz '2000-01-01 00:00+00') as first_kept,
        (select p.at from {schema}.depth_peaks p where p.seconds = l.seconds and p.is_total order by p.at desc limit 1) as last_added
    from unnest(%(levels)s::integer[], %(kept_s)s::integer[]) l (seconds, kept_s)
), sampled as materialized (
    select least(
        (select d.at from {schema}.depths d where d.seconds = 60 order by d.at limit 1),
        (select d.at from {schema}.depths d where d.seconds = 3600 order by d.at limit 1)
    ) as since
), span as materialized (
    select x.seconds, x.at, x.at + x.length as until
    from (
        select
            l.seconds, l.length,
            greatest(l.first_kept, coalesce(l.last_added + l.length, date_bin(l.length, s.since, timestamptz '2000-01-01 00:00+00'))) as at
        from level l
        cross join sampled s
        where s.since is not null or l.last_added is not null
    ) x
    where x.at + x.length + %(settle_s)s::integer * interval '1 second' <= statement_timestamp()
    order by x.seconds desc
    limit 1
), sample as materialized (
    select
        d.at, d.queue, d.due, d.scheduled, d.suspended, d.claimed, d.running, d.oldest_due_s,
        coalesce(cardinality(d.at_least) > 0, false) as at_least
    from span p
    join {schema}.depths d on d.seconds in (60, 3600) and d.at >= p.at and d.at < p.until
), added as (
    insert into {schema}.depth_peaks (seconds, is_total, at, queue, due, scheduled, suspended, claimed, running, oldest_due_s, at_least)
    select
        p.seconds, x.is_total, p.at, x.queue, max(x.due), max(x.scheduled), max(x.suspended), max(x.claimed), max(x.running), max(x.oldest_due_s),
        bool_or(x.at_least)
    from span p
    cross join (
        select true as is_total, '' as queue, t.*
        from (select 1) one
        left join (
            select
                coalesce(sum(s.due), 0)::bigint as due, coalesce(sum(s.scheduled), 0)::bigint as scheduled,
                coalesce(sum(s.suspended), 0)::bigint as suspended, coalesce(sum(s.claimed), 0)::bigint as claimed,
                coalesce(sum(s.running), 0)::bigint as running, max(s.oldest_due_s) as oldest_due_s, bool_or(s.at_least) as at_least
            from sample s
            group by s.at
        ) t on true
        union all
        select false, s.queue, s.due, s.scheduled, s.suspended, s.claimed, s.running, s.oldest_due_s, s.at_least
        from sample s
        where s.queue is not null
    ) x
    group by p.seconds, x.is_total, p.at, x.queue
    order by x.is_total, x.queue
    on conflict (seconds, is_total, at, queue) do nothing
)
select exists (select from span) as is_added
