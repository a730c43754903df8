-- Every lease with its holder and what a recovery decision needs; ages by the database's clock.
create view {schema}.leases as
select
    t.id, t.claim_id, t.state, t.name, t.claimed_by_worker_id as worker_id, w.supervisor_id, w.hostname, w.pid, t.claimed_at, t.started_at,
    greatest(s.last_beat_at, w.last_beat_at, t.claimed_at, t.started_at) as last_beat_at, t.policy::text as policy, t.flags::text as flags,
    t.retry_count, t.crash_count, t.loss_count, t.cancel_requested_at is not null as cancel_requested, t.attempt, t.fence,
    w.beat_seq as worker_seq, w.ended_how, w.ended_cause, w.ended_at,
    (extract(epoch from statement_timestamp() - greatest(s.last_beat_at, w.last_beat_at, t.claimed_at, t.started_at)) * 1000)::bigint as silent_ms
from {schema}.tasks t
join {schema}.workers w on w.id = t.claimed_by_worker_id
join {schema}.supervisors s on s.id = w.supervisor_id
where t.state in ('CLAIMED', 'RUNNING')
