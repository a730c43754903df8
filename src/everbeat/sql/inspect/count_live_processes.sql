-- Count the live workers and supervisors, and return whether there is any work. A tree without a session in PostgreSQL does not count as
-- live. At most 100,000 tasks of lines and 10,000 groups of marked tasks are read.
with recursive {fragment/lanes}, {fragment/marked_lanes}, lost as materialized (
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
        or exists (select from lane l where l.first_at <= statement_timestamp())
        or exists (select from (select l.first_at from marked_lane l limit 10000) l where l.first_at <= statement_timestamp())
        or exists (
            select from (
                select t.enqueued_at from {schema}.tasks t
                where t.state = 'PENDING' and t.serial is not null order by t.serial, t.serial_at, t.id limit 100000
            ) t
            where t.enqueued_at <= statement_timestamp()
        ) as has_work,
    (select count(*) from lost) as lost,
    array(
        select s.id from {schema}.supervisors s
        where s.ended_at is null and s.quiet_since is not null
          and s.last_beat_at > statement_timestamp() - greatest(%(stale_ms)s, s.claimed_stale_ms) * interval '1 millisecond'
          and s.id not in (select l.id from lost l)
        order by s.quiet_since, s.id
    ) as quiet
