-- Count the live workers and supervisors, and return whether there is any work. A tree without a session in PostgreSQL does not count as
-- live.
with lost as materialized (
    select x.id from {schema}.trees_without_session() x
)
select
    (
        select count(*) from {schema}.supervisors s
        where s.ended_at is null and s.last_beat_at > statement_timestamp() - greatest(%(stale_ms)s, s.claimed_stale_ms) * interval '1 millisecond'
          and s.id not in (select l.id from lost l)
    ) as supervisors,
    (
        select count(*)
        from {schema}.workers w
        join {schema}.supervisors s on s.id = w.supervisor_id
        where w.ended_at is null and s.ended_at is null
          and greatest(s.last_beat_at, w.last_beat_at) > statement_timestamp() - greatest(%(stale_ms)s, s.claimed_stale_ms) * interval '1 millisecond'
          and s.id not in (select l.id from lost l)
    ) as workers,
    (
        select max(greatest(s.last_beat_at, w.last_beat_at, w.started_at))
        from {schema}.supervisors s
        left join {schema}.workers w on w.supervisor_id = s.id
    ) as last_beat_at,
    exists (select from {schema}.tasks t where t.state in ('CLAIMED', 'RUNNING'))
        or exists (
            select from {schema}.tasks t
            where t.state = 'PENDING' and t.serial is null and t.needs_id is null and t.enqueued_at <= statement_timestamp()
        )
        or exists (
            select from {schema}.tasks t
            where t.state = 'PENDING' and t.serial is null and t.needs_id is not null and t.enqueued_at <= statement_timestamp()
        )
        or exists (
            select from {schema}.tasks t
            where t.serial is not null and t.state in ('PENDING', 'CLAIMED', 'RUNNING') and t.enqueued_at <= statement_timestamp()
        ) as has_work,
    (select count(*) from lost) as lost,
    array(
        select s.id from {schema}.supervisors s
        where s.ended_at is null and s.quiet_since is not null
          and s.last_beat_at > statement_timestamp() - greatest(%(stale_ms)s, s.claimed_stale_ms) * interval '1 millisecond'
          and s.id not in (select l.id from lost l)
        order by s.quiet_since, s.id
    ) as quiet
