-- List workers with their latest sign of life and the tasks that they hold, newest heartbeat first. Staleness is judged by the database's
-- clock, against the longer of the caller's threshold and the tree's own. If `exact` is set, only the caller's threshold counts. On a
-- standby, heartbeats arrive late, so an old heartbeat proves nothing and staleness is null. A worker is lost if its tree no longer has a
-- session in PostgreSQL. Tasks are counted only for the workers that are listed.
with listed as materialized (
    select w.id, beat.at
    from {schema}.workers w
    join {schema}.supervisors s on s.id = w.supervisor_id
    cross join lateral (select greatest(s.last_beat_at, w.last_beat_at, w.started_at) as at) beat
    where %(ended_too)s or (w.ended_at is null and s.ended_at is null)
    order by beat.at desc, w.id
    limit %(limit)s
)
select
    w.id, w.supervisor_id, w.hostname, w.pid, w.queues, w.started_at, l.at as last_heartbeat_at,
    nullif(l.at < statement_timestamp() - case when %(exact)s then %(stale_ms)s else greatest(%(stale_ms)s, s.claimed_stale_ms) end * interval '1 millisecond', pg_is_in_recovery() or null) as is_stale,
    s.draining, coalesce(w.ended_at, s.ended_at) as ended_at, coalesce(w.ended_how, s.ended_how) as ended_how, w.ended_cause,
    w.exit_code, w.signal, w.metadata::text, held.claimed, held.running,
    coalesce(w.ended_at, s.ended_at) is null and s.id = any (array(select x.id from {schema}.trees_without_session() x)) as session_lost,
    s.quiet_since
from listed l
join {schema}.workers w on w.id = l.id
join {schema}.supervisors s on s.id = w.supervisor_id
cross join lateral (
    select count(*) filter (where t.state = 'CLAIMED') as claimed, count(*) filter (where t.state = 'RUNNING') as running
    from {schema}.tasks t
    where t.claimed_by_worker_id = w.id and t.state in ('CLAIMED', 'RUNNING')
) held
order by l.at desc, w.id
