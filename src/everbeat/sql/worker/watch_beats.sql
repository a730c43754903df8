-- Return the heartbeats of all supervisors, and of workers that have sent their own heartbeats. Each observer compares these heartbeats by
-- its own clock.
select
    s.id, s.beat_seq, (extract(epoch from statement_timestamp() - coalesce({schema}.plausible(s.last_beat_at), '0002-01-01 00:00:00+00')) * 1000)::bigint as silent_ms,
    (
        select json_object_agg(w.id, w.beat_seq) from {schema}.workers w
        where w.supervisor_id = s.id and w.ended_at is null and w.beat_seq > 0
    ) as worker_seqs,
    pg_postmaster_start_time() as server_started_at, s.claimed_stale_ms, s.running_stale_ms
from {schema}.supervisors s
where s.ended_at is null
order by s.id
