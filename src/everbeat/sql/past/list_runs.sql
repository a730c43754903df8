-- List up to `limit` attempts whose code ran at a moment. Those that started first come first.
-- Ended attempts of at least a second are found by attempts_long, and shorter ones by attempts_by_end. Those that still run are found by
-- tasks_leased, and their names by the primary key. Attempts of tasks in `history` are not found.
with long as materialized (
    select a.task_id, a.attempt, a.worker_id, a.started_at, a.ended_at, a.outcome
    from {schema}.attempts a
    where tstzrange(a.started_at, a.ended_at) @> %(at)s::timestamptz
      and a.started_at >= timestamptz '2000-01-01 00:00+00' and a.ended_at < timestamptz '3000-01-01 00:00+00'
      and a.ended_at - a.started_at >= interval '1 second'
    limit %(limit)s
), short as materialized (
    select a.task_id, a.attempt, a.worker_id, a.started_at, a.ended_at, a.outcome
    from {schema}.attempts a
    where a.ended_at > %(at)s::timestamptz and a.ended_at <= %(at)s::timestamptz + interval '1 second' and a.started_at <= %(at)s::timestamptz
      and a.started_at > %(at)s::timestamptz - interval '1 second' and a.ended_at - a.started_at < interval '1 second'
    limit %(limit)s
), live as materialized (
    select t.id as task_id, t.attempt, t.claimed_by_worker_id as worker_id, t.started_at, null::timestamptz as ended_at, null::text as outcome
    from {schema}.tasks t
    where t.state in ('CLAIMED', 'RUNNING') and t.state || '' = 'RUNNING' and t.claimed_by_worker_id is not null and t.started_at <= %(at)s::timestamptz
    limit %(limit)s
)
select r.task_id, named.name, named.queue, r.attempt, r.worker_id, {schema}.plausible(r.started_at) as started_at, r.ended_at, r.outcome
from (
    select x.* from (
        select l.* from long l
        union all
        select s.* from short s
        union all
        select v.* from live v
    ) x
    order by x.started_at, x.task_id
    limit %(limit)s
) r
left join lateral (
    select t.name, t.queue from {schema}.tasks t where t.id = r.task_id
) named on true
order by r.started_at, r.task_id
