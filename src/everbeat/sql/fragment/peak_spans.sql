-- The parts of the time from `since` that peaks cover, those of the longest spans first. Each part begins where the one before it ends. Peaks of
-- short spans are deleted first. So a length is used only if no samples are older than its peaks. `depths` has the samples after the last
-- part. The fragment needs `with recursive`. The primary key of `depth_peaks` and depths_by_time serve it.
kept as materialized (
    select
        l.seconds,
        (select p.at from {schema}.depth_peaks p where p.seconds = l.seconds and p.is_total order by p.at limit 1) as since,
        (select p.at from {schema}.depth_peaks p where p.seconds = l.seconds and p.is_total order by p.at desc limit 1)
            + l.seconds * interval '1 second' as until
    from unnest(%(levels)s::integer[]) l (seconds)
), covered (seconds, since, until) as (
    select null::integer, %(since)s::timestamptz, %(since)s::timestamptz
    union all
    select next.seconds, c.until, next.until
    from covered c
    cross join lateral (
        select k.seconds, least(k.until, %(until)s::timestamptz) as until
        from kept k
        where k.since is not null and (c.seconds is null or k.seconds < c.seconds) and least(k.until, %(until)s::timestamptz) > c.until
          and not exists (select from {schema}.depths d where d.seconds in (60, 3600) and d.at >= c.until and d.at < k.since)
        order by k.seconds desc
        limit 1
    ) next
)
