-- The parts of the time from `since` that sums cover, those of the longest spans first. Each part begins where the one before it ends. Sums of short
-- spans are deleted first. So a length is used only if no rates are older than its sums. `rates` has the counts after the last
-- part. The fragment needs `with recursive`. The primary keys of `rate_sums` and `rates` serve it.
kept as materialized (
    select
        l.seconds,
        (select s.at from {schema}.rate_sums s where s.seconds = l.seconds and s.is_total order by s.at limit 1) as since,
        (select s.at from {schema}.rate_sums s where s.seconds = l.seconds and s.is_total order by s.at desc limit 1)
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
          and not exists (select from {schema}.rates r where r.seconds in (60, 3600) and r.at >= c.until and r.at < k.since)
        order by k.seconds desc
        limit 1
    ) next
)
