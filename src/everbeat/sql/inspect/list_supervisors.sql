-- List supervisors with their latest heartbeat, newest heartbeat first. Staleness is judged by the database's clock, against the longer of
-- the caller's threshold and the tree's own. If `exact` is set, only the caller's threshold counts. On a standby, heartbeats arrive late,
-- so an old heartbeat proves nothing and staleness is null. A supervisor is lost if its tree no longer has a session in PostgreSQL.
select
    s.id, s.hostname, s.pid, s.started_at, s.last_beat_at, s.beat_seq,
    nullif(s.last_beat_at < statement_timestamp() - case when %(exact)s then %(stale_ms)s else greatest(%(stale_ms)s, s.claimed_stale_ms) end * interval '1 millisecond', pg_is_in_recovery() or null) as is_stale,
    s.draining, s.session_held, s.ended_at, s.ended_how,
    (select count(*) from {schema}.workers w where w.supervisor_id = s.id and w.ended_at is null) as workers,
    s.id = any (array(select x.id from {schema}.trees_without_session() x)) as session_lost,
    s.processes, s.start_problem, {schema}.plausible(s.start_problem_at) as start_problem_at,
    s.quiet_since, s.slot
from {schema}.supervisors s
where %(ended_too)s or s.ended_at is null
order by s.last_beat_at desc, s.id
limit %(limit)s
