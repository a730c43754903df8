-- Heartbeats as an operator reads them: the claim, the start and every later heartbeat of each leased task.
create view {schema}.heartbeats as
select t.id as task_id, w.id as sender_id, proof.role, proof.sent_at, w.hostname, w.pid, s.id as supervisor_id
from {schema}.tasks t
join {schema}.workers w on w.id = t.claimed_by_worker_id
join {schema}.supervisors s on s.id = w.supervisor_id
cross join lateral (
    select 'claimer' as role, t.claimed_at as sent_at
    union all
    select 'runner', t.started_at where t.started_at is not null
    union all
    select case when t.started_at is null or b.sent_at < t.started_at then 'claimer' else 'runner' end, b.sent_at
    from {schema}.beats b
    where b.supervisor_id = s.id and b.sent_at >= t.claimed_at
    union all
    select case when t.started_at is null or w.last_beat_at < t.started_at then 'claimer' else 'runner' end, w.last_beat_at
    where w.last_beat_at >= t.claimed_at
) proof
where t.state in ('CLAIMED', 'RUNNING')
