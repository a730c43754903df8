-- Recoveries, newest first, and when the task ran again: at the start of the first later claim whose code started.
select
    r.id, r.task_id, r.name, r.queue, r.attempt, r.fence, r.worker_id, r.supervisor_id, r.hostname, r.pid, r.was, r.cause, r.noticed_by,
    r.last_beat_at, r.noticed_at, r.noticed_after_ms, r.action, r.next_retry_at, r.recovered_by, r.certificate::text,
    (
        select min(later.started_at)
        from (
            select a.started_at from {schema}.attempts a where a.task_id = r.task_id and a.fence > r.fence
            union all
            select t.started_at from {schema}.tasks t where t.id = r.task_id and t.fence > r.fence
        ) later
    ) as ran_again_at
from {schema}.recoveries r
where (%(task_id)s::uuid is null or r.task_id = %(task_id)s)
order by r.id desc
limit %(limit)s
