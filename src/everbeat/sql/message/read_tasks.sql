-- Return the rows of the tasks that messages name: the name, state and fence of each task, and the parameters that a worker must know. Also
-- return whether the task is due, paused or blocked by its serial line. If a worker holds the task, also return the worker and how long it
-- has been silent. Unknown tasks have no row.
select
    t.id, t.name, t.state, t.fence, t.enqueued_at <= statement_timestamp() as due,
    t.state = 'PENDING' and exists (
        select from {schema}.pauses p where (p.kind = 'queue' and p.name = t.queue) or (p.kind = 'task' and p.name = t.name)
    ) as paused,
    t.state = 'PENDING' and t.serial is not null and not starts_with(t.serial, 'limit:') and exists (
        select from {schema}.tasks other
        where other.serial = t.serial and other.serial is not null and other.state in ('PENDING', 'CLAIMED', 'RUNNING')
          and other.id <> t.id and (other.state <> 'PENDING' or (other.serial_at, other.id) < (t.serial_at, t.id))
    ) as kept_back,
    case when t.claim_id is not null then t.claimed_by_worker_id end as holder,
    case when t.claim_id is not null then (
        select w.ended_at is not null
            or statement_timestamp() - greatest(s.last_beat_at, w.last_beat_at, t.claimed_at, t.started_at) > greatest(%(stale_ms)s, s.running_stale_ms) * interval '1 millisecond'
        from {schema}.workers w join {schema}.supervisors s on s.id = w.supervisor_id
        where w.id = t.claimed_by_worker_id
    ) end as stale,
    t.needs::text as needs
from unnest(%(ids)s::uuid[]) as m (id)
cross join lateral (select * from {schema}.tasks t where t.id = m.id limit 1) t
