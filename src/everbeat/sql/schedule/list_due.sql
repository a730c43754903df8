-- Return a page of due schedules with their live runs, and the seconds until the next one that is not due yet. The first column is the same
-- in each row; without a due schedule, the other columns of the only row are null. Live runs are counted only for the overlap policies that
-- ask for them, and at most 100. Failures are the latest ended runs since the schedule was last held. A row that no decision can change is
-- left out, because it would stay on the first page: a row that is due although it is paused, or one with a moment that Python cannot hold.
with upcoming as materialized (
    select (extract(epoch from s.next_at) - extract(epoch from statement_timestamp()))::float8 as wait_s
    from {schema}.schedules s
    where s.next_at > statement_timestamp() and s.timezone <> all(%(unknown_zones)s::text[])
    order by s.next_at
    limit 1
), due as materialized (
    select
        s.name, s.timing::text, s.missed, s.most, s.catchup_ms, s.overlap, s.jitter_ms, s.starts_at, s.ends_at, s.most_runs,
        s.pause_after_failures, s.expires_ms, s.decided_to, s.runs, s.paused_at is not null as is_paused, s.resume_at, s.held_until,
        s.held_because, s.changed_at, s.next_at
    from {schema}.schedules s
    where s.next_at <= statement_timestamp() and s.timezone <> all(%(unknown_zones)s::text[]) and s.name <> all(%(skipped)s::text[])
      and s.retired_at is null and s.ended_at is null and (s.paused_at is null or s.resume_at <= statement_timestamp())
      and s.decided_to between '0002-01-01 00:00:00+00' and '9998-12-31 23:59:59+00'
      and s.changed_at between '0002-01-01 00:00:00+00' and '9998-12-31 23:59:59+00'
    order by s.next_at
    limit %(limit)s
)
select
    (select u.wait_s from upcoming u) as wait_s, statement_timestamp() as at,
    d.name, d.timing, d.missed, d.most, d.catchup_ms, d.overlap, d.jitter_ms, d.starts_at, d.ends_at, d.most_runs, d.pause_after_failures,
    d.expires_ms, d.decided_to, d.runs, d.is_paused, d.resume_at, d.held_until, d.held_because, d.changed_at,
    run.live, run.waiting, ended.failures
from (select) always
left join due d on true
left join lateral (
    select count(*) as live, count(*) filter (where r.state <> 'RUNNING' and r.attempt = 0) as waiting
    from (
        select t.state, t.attempt from {schema}.tasks t
        where t.schedule = d.name and t.state in ('PENDING', 'CLAIMED', 'RUNNING') and d.overlap in ('skip', 'buffer_one')
        limit 100
    ) r
) run on true
left join lateral (
    select coalesce(min(e.place) filter (where e.state <> 'FAILED') - 1, count(*)) as failures
    from (
        select t.state, row_number() over (order by k.at desc) as place
        from (
            select k.at, k.task_id from {schema}.ticks k
            where k.schedule = d.name and d.pause_after_failures is not null and (d.held_until is null or k.at > d.held_until)
            order by k.at desc
            limit 1000
        ) k
        cross join lateral (
            select coalesce(
                (select t.state from {schema}.tasks t where t.id = k.task_id), (select h.state from {schema}.history h where h.id = k.task_id)
            ) as state
        ) t
        where t.state in ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED')
        order by k.at desc
        limit greatest(d.pause_after_failures, 0)
    ) e
) ended on true
order by d.next_at, d.name
