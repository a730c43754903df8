-- Return the lease of one task with its holder, the holder's other tasks, the worker's latest snapshot, and the supervisors that could
-- recover the lease. All other supervisors could recover the lease, and so could the holder's own supervisor once the worker has ended. A
-- tree without a session in PostgreSQL recovers nothing.
with lost as materialized (
    select x.id from {schema}.trees_without_session() x
)
select
    l.worker_id, l.supervisor_id, l.hostname, l.pid, l.claimed_at, l.started_at, l.last_beat_at, l.silent_ms, l.ended_at, l.ended_how, l.ended_cause,
    l.cancel_requested, l.alone, l.suspect, l.flags,
    array(
        select t.id from {schema}.tasks t
        where t.claimed_by_worker_id = l.worker_id and t.state in ('CLAIMED', 'RUNNING') and t.state = 'RUNNING' and t.id <> l.id
        order by t.started_at
        limit 1001
    ) as neighbours,
    (
        select count(*) from {schema}.supervisors s
        where s.ended_at is null and (s.id is distinct from l.supervisor_id or l.ended_at is not null)
          and s.last_beat_at > statement_timestamp() - greatest(%(stale_ms)s, s.claimed_stale_ms) * interval '1 millisecond'
          and s.id not in (select x.id from lost x)
    ) as observers,
    (select t.left_at from {schema}.tasks t where t.id = l.id and t.left_claim_id = l.claim_id) as left_at,
    pg_is_in_recovery() as is_standby,
    l.supervisor_id is not null and l.supervisor_id in (select x.id from lost x) as session_lost,
    latest.loop_lag_ms, latest.at,
    l.claimed_stale_ms, l.running_stale_ms,
    (select s.beat_ms from {schema}.supervisors s where s.id = l.supervisor_id) as beat_ms
from {schema}.leases l
left join lateral (
    select x.loop_lag_ms, x.at from {schema}.worker_states x where x.worker_id = l.worker_id order by x.at desc limit 1
) latest on true
where l.id = %(id)s
