-- Whether a workflow is moved on: what has happened to it that nobody has acted on yet, the oldest of that, and who lives to do so.
-- Counts of what has happened stop at 1,001.
with happened as materialized (
    select o.at from {schema}.outbox o where o.workflow_id = %(id)s order by o.id limit 1001
), living as (
    select w.id
    from {schema}.workers w
    join {schema}.supervisors s on s.id = w.supervisor_id
    where w.ended_at is null and s.ended_at is null and not s.draining
      and greatest(s.last_beat_at, w.last_beat_at) > statement_timestamp() - greatest(%(stale_ms)s, s.claimed_stale_ms) * interval '1 millisecond'
      and s.id <> all (array(select x.id from {schema}.trees_without_session() x))
)
select
    statement_timestamp() as at, (select count(*) from happened) as unmoved, (select min(h.at) from happened h) as unmoved_since,
    (select count(*) from living) as alive, (select max(s.last_beat_at) from {schema}.supervisors s) as last_beat_at,
    pg_is_in_recovery() as is_standby
