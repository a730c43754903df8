-- The beats of all supervisors and of workers that beat for themselves: what an observer compares on its own clock.
select
    s.id, s.beat_seq, (extract(epoch from statement_timestamp() - s.last_beat_at) * 1000)::bigint as silent_ms,
    coalesce((select sum(w.beat_seq) from {schema}.workers w where w.supervisor_id = s.id and w.ended_at is null), 0)::bigint as workers_seq,
    (extract(epoch from statement_timestamp() - pg_postmaster_start_time()) * 1000)::bigint as server_age_ms
from {schema}.supervisors s
where s.ended_at is null
