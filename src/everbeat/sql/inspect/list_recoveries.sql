-- List recoveries, newest first. Each row shows when and where the task ran next (its first later claim whose code started), and the task's
-- present state. A recovery is noticed before the task ends, so a search since a time reads only later partitions.
-- No index serves the other filters. So at most `most` recovered tasks in `history` are examined (null: all). The tasks that ended last come
-- first.
with found as materialized (
    (
        select
            r.id, r.task_id, r.name, r.queue, r.attempt, r.fence, r.worker_id, r.supervisor_id, r.hostname, r.pid, r.was, r.cause, r.noticed_by,
            r.last_beat_at, r.noticed_at, r.noticed_after_ms, r.action, r.next_retry_at, r.recovered_by, r.certificate, r.charge, r.suspect, r.hook,
            t.state as became, t.fence as last_fence, greatest(t.completed_at, t.failed_at, t.cancelled_at, t.expired_at) as became_at,
            t.started_at, t.claimed_by_worker_id, null::{schema}.history_attempt[] as attempts
        from {schema}.recoveries r
        left join {schema}.tasks t on t.id = r.task_id
        where (%(task_id)s::uuid is null or r.task_id = %(task_id)s)
          and (%(number)s::bigint is null or r.id = %(number)s)
          and (%(worker)s::text is null or r.worker_id = %(worker)s)
          and (%(since)s::timestamptz is null or r.noticed_at >= %(since)s)
          and (%(within_ms)s::bigint is null or r.noticed_at >= statement_timestamp() - %(within_ms)s * interval '1 millisecond')
          and (%(cause)s::text is null or strpos(lower(r.cause), lower(%(cause)s)) > 0 or r.noticed_by = %(cause)s)
          and (%(ended_before)s::timestamptz is null
              or greatest(t.completed_at, t.failed_at, t.cancelled_at, t.expired_at) < %(ended_before)s)
        order by r.id desc
        limit %(limit)s
    )
    union all
    (
        select
            r.id, r.task_id, r.name, r.queue, r.attempt, r.fence, r.worker_id, r.supervisor_id, r.hostname, r.pid, r.was, r.cause, r.noticed_by,
            r.last_beat_at, r.noticed_at, r.noticed_after_ms, r.action, r.next_retry_at, r.recovered_by, r.certificate, r.charge, r.suspect, r.hook,
            h.state, h.fence, h.ended_at, h.started_at, h.claimed_by_worker_id, h.attempts
        from (
            select h.* from {schema}.history h
            where {fragment/recovered_scope} and (%(oldest)s::timestamptz is null or h.ended_at >= %(oldest)s)
            order by h.ended_at desc
            limit %(most)s
        ) h
        cross join lateral unnest(h.recoveries) r
        where (%(task_id)s::uuid is null or r.task_id = %(task_id)s)
          and (%(number)s::bigint is null or r.id = %(number)s)
          and (%(worker)s::text is null or r.worker_id = %(worker)s)
          and (%(since)s::timestamptz is null or r.noticed_at >= %(since)s)
          and (%(within_ms)s::bigint is null or r.noticed_at >= statement_timestamp() - %(within_ms)s * interval '1 millisecond')
          and (%(cause)s::text is null or strpos(lower(r.cause), lower(%(cause)s)) > 0 or r.noticed_by = %(cause)s)
        order by r.id desc
        limit %(limit)s
    )
)
select
    r.id, r.task_id, r.name, r.queue, r.attempt, r.fence, r.worker_id, r.supervisor_id, r.hostname, r.pid, r.was, r.cause, r.noticed_by,
    r.last_beat_at, r.noticed_at, r.noticed_after_ms, r.action, r.next_retry_at, r.recovered_by, r.certificate::text,
    again.started_at as ran_again_at, r.charge, r.suspect, r.hook, again.worker_id as ran_again_on, r.became, r.became_at
from found r
left join lateral (
    select later.started_at, later.worker_id
    from (
        select a.started_at, a.worker_id from {schema}.attempts a where a.task_id = r.task_id and a.fence > r.fence
        union all
        select a.started_at, a.worker_id from unnest(r.attempts) a where a.fence > r.fence
        union all
        select r.started_at, r.claimed_by_worker_id where r.last_fence > r.fence and r.started_at is not null
    ) later
    order by later.started_at
    limit 1
) again on true
order by r.id desc
limit %(limit)s
