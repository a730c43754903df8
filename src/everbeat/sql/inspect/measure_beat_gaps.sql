-- Measure the time between consecutive heartbeats of each supervisor over the last day of the stored history. If no supervisor sent a
-- heartbeat for more than two usual gaps, the database was down, or no other supervisor was running. Such an outage is counted separately
-- and subtracted from the supervisors' gaps. `alone_s`: the longest outage in which only one supervisor was silent. Such an outage cannot
-- be distinguished from the silence of that supervisor.
with recent as materialized (
    select b.supervisor_id, b.seq, b.sent_at from {schema}.beats b
    where b.sent_at between statement_timestamp() - interval '1 day' and statement_timestamp() + interval '1 day'
    order by b.sent_at desc
    limit 100000
), gap as materialized (
    select g.supervisor_id, g.began_at, g.sent_at, extract(epoch from g.sent_at - g.began_at)::float8 as seconds
    from (
        select r.supervisor_id, r.sent_at, lag(r.sent_at) over (partition by r.supervisor_id order by r.seq) as began_at from recent r
    ) g
    where g.began_at is not null
), usual as materialized (
    select percentile_cont(0.5) within group (order by g.seconds) as seconds from gap g
), long as materialized (
    select g.* from gap g, usual u where g.seconds > 2 * u.seconds
), hole as materialized (
    select h.began_at, h.ended_at, extract(epoch from h.ended_at - h.began_at)::float8 as seconds
    from (select lag(r.sent_at) over (order by r.sent_at) as began_at, r.sent_at as ended_at from recent r) h, usual u
    where extract(epoch from h.ended_at - h.began_at) > 2 * u.seconds
), outage as materialized (
    select h.*, silent.trees
    from hole h
    cross join lateral (
        select count(distinct l.supervisor_id) as trees from long l where l.sent_at > h.began_at and l.began_at < h.ended_at
    ) silent
    where silent.trees > 0
), own as materialized (
    select g.supervisor_id, g.sent_at, g.seconds from gap g, usual u where g.seconds <= 2 * u.seconds
    union all
    select l.supervisor_id, l.sent_at, greatest(0, l.seconds - coalesce((
        select sum(extract(epoch from least(o.ended_at, l.sent_at) - greatest(o.began_at, l.began_at)))::float8
        from outage o where o.began_at < l.sent_at and o.ended_at > l.began_at
    ), 0))
    from long l
), longest as (
    select o.* from own o order by o.seconds desc limit 1
)
select
    count(o.seconds) as count, percentile_cont(0.5) within group (order by o.seconds) as median,
    percentile_cont(0.99) within group (order by o.seconds) as p99, max(o.seconds) as longest,
    (select l.supervisor_id from longest l) as supervisor_id, (select l.sent_at from longest l) as ended_at,
    (select count(*) from outage) as outages, (select max(x.seconds) from outage x) as outage_s,
    (select max(x.ended_at) from outage x) as outage_at, (select max(x.seconds) from outage x where x.trees = 1) as alone_s
from own o
