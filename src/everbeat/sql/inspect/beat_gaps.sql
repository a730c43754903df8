-- The time between two beats of a supervisor, in the last day of what history is kept.
with recent as materialized (
    select b.supervisor_id, b.seq, b.sent_at from {schema}.beats b
    where b.sent_at between statement_timestamp() - interval '1 day' and statement_timestamp() + interval '1 day'
    order by b.sent_at desc
    limit 100000
), gap as materialized (
    select
        r.supervisor_id, r.sent_at,
        extract(epoch from r.sent_at - lag(r.sent_at) over (partition by r.supervisor_id order by r.seq))::float8 as seconds
    from recent r
), longest as (
    select g.* from gap g where g.seconds is not null order by g.seconds desc limit 1
)
select
    count(g.seconds) as count, percentile_cont(0.5) within group (order by g.seconds) as median,
    percentile_cont(0.99) within group (order by g.seconds) as p99, max(g.seconds) as longest,
    (select l.supervisor_id from longest l) as supervisor_id, (select l.sent_at from longest l) as ended_at
from gap g
