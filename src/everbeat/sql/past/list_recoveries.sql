-- List the recoveries that were noticed within `window_ms` before a moment, the latest first, at most `limit` of them. recoveries_by_time finds
-- them. Each row shows when and where the task ran next. Recoveries of tasks in `history` are not found. The
-- offset keeps the planner from reading the whole table of tasks.
select
    r.id, r.task_id, r.name, r.queue, r.attempt, r.fence, r.worker_id, r.supervisor_id, r.hostname, r.pid, r.was, r.cause, r.noticed_by,
    r.last_beat_at, r.noticed_at, r.noticed_after_ms, r.action, r.next_retry_at, r.recovered_by, r.certificate::text,
    again.started_at as ran_again_at, r.charge, r.suspect, r.hook, again.worker_id as ran_again_on, t.state as became,
    greatest(t.completed_at, t.failed_at, t.cancelled_at, t.expired_at) as became_at
from (
    select r.* from {schema}.recoveries r
    where r.noticed_at > %(at)s::timestamptz - %(window_ms)s * interval '1 millisecond' and r.noticed_at <= %(at)s
    order by r.noticed_at desc
    limit %(limit)s
) r
left join lateral (
    select x.state, x.fence, x.started_at, x.claimed_by_worker_id, x.completed_at, x.failed_at, x.cancelled_at, x.expired_at
    from {schema}.tasks x
    where x.id = r.task_id
    offset 0
) t on true
left join lateral (
    select later.started_at, later.worker_id
    from (
        select a.started_at, a.worker_id from {schema}.attempts a where a.task_id = r.task_id and a.fence > r.fence
        union all
        select t.started_at, t.claimed_by_worker_id where t.fence > r.fence and t.started_at is not null
    ) later
    order by later.started_at
    limit 1
) again on true
order by r.id desc
