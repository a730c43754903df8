-- List recoveries, newest first. Each row shows when and where the task ran next (its first later claim whose code started), and the task's
-- present state.
select
    r.id, r.task_id, r.name, r.queue, r.attempt, r.fence, r.worker_id, r.supervisor_id, r.hostname, r.pid, r.was, r.cause, r.noticed_by,
    r.last_beat_at, r.noticed_at, r.noticed_after_ms, r.action, r.next_retry_at, r.recovered_by, r.certificate::text,
    again.started_at as ran_again_at, r.charge, r.suspect, r.hook, again.worker_id as ran_again_on, t.state as became
from {schema}.recoveries r
left join {schema}.tasks t on t.id = r.task_id
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
where (%(task_id)s::uuid is null or r.task_id = %(task_id)s)
  and (%(number)s::bigint is null or r.id = %(number)s)
  and (%(worker)s::text is null or r.worker_id = %(worker)s)
  and (%(since)s::timestamptz is null or r.noticed_at >= %(since)s)
  and (%(within_ms)s::bigint is null or r.noticed_at >= statement_timestamp() - %(within_ms)s * interval '1 millisecond')
  and (%(cause)s::text is null or strpos(lower(r.cause), lower(%(cause)s)) > 0 or r.noticed_by = %(cause)s)
order by r.id desc
limit %(limit)s
