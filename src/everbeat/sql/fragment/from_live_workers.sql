-- The workers that can claim tasks. Neither the workers nor their supervisors have ended, are draining, are silent, or have lost their
-- sessions.
from {schema}.workers w
join {schema}.supervisors s on s.id = w.supervisor_id
where w.ended_at is null and s.ended_at is null and not s.draining
  and greatest(s.last_beat_at, w.last_beat_at) > statement_timestamp() - greatest(%(stale_ms)s, s.claimed_stale_ms) * interval '1 millisecond'
  and s.id <> all (array(select x.id from {schema}.trees_without_session() x))
