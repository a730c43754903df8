-- Retry a task on behalf of an operator: FAILED | CANCELLED | EXPIRED -> PENDING, due now, with new budgets. The id of the call makes the
-- retry idempotent. A task that belongs to a node is not retried here; its workflow is retried instead. The numbering of attempts
-- continues, and finished parts of the work stay finished. If the task ended because a wait timed out, the wait starts again. In a serial
-- line, the task moves to the end. The mark of the needs is cleared, so the next worker that claims the task judges its arguments again. A
-- mark with a requirement that this version does not know is kept. Otherwise, claims of this version would take a task that they must not
-- run. A task with the same name that has the key prevents the retry, because a key has at most one task. In that case, the reply names
-- that task.
with held as materialized (
    select t.* from {schema}.tasks t where t.id = %(id)s for no key update
), rival as materialized (
    select o.id
    from held h
    join {schema}.tasks o on o.name = h.name and o.key = h.key and o.id <> h.id and o.state in ('PENDING', 'CLAIMED', 'RUNNING')
    where h.state in ('FAILED', 'CANCELLED', 'EXPIRED') and h.workflow_id is null
    union all
    select u.task_id
    from held h
    join {schema}.unique_keys u on u.name = h.name and u.key = h.unique_key and u.task_id <> h.id
    where h.state in ('FAILED', 'CANCELLED', 'EXPIRED') and h.workflow_id is null and (u.until is null or u.until > statement_timestamp())
), again as (
    update {schema}.tasks t
    set state = 'PENDING', enqueued_at = statement_timestamp(), next_retry_at = null, good_until = null,
        counted_from = t.attempt, retry_count = 0, crash_count = 0, loss_count = 0, cancel_requested_at = null,
        failed_at = null, cancelled_at = null, expired_at = null, error = null, progress = null,
        claimed_at = null, claimed_by_worker_id = null, started_at = null, suspect = false, waits_for = null, wake_at = null,
        needs = case when later.is_marked then t.needs end, needs_id = case when later.is_marked then t.needs_id end, retry_call = %(call)s,
        serial_at = case when t.serial is not null then statement_timestamp() end
    from held h
    cross join lateral (
        select exists (
            select from json_object_keys(case when json_typeof(h.needs) = 'object' then h.needs end) k (name) where k.name not in ('arguments', 'limits')
        ) as is_marked
    ) later
    where t.id = h.id and h.state in ('FAILED', 'CANCELLED', 'EXPIRED') and h.workflow_id is null and h.retry_call is distinct from %(call)s
      and not exists (select from rival)
    returning t.id, t.queue
), anew as (
    delete from {schema}.steps s
    using again a, held h
    where s.task_id = a.id and h.error::text ~ '^[{{]"code": ?"EVENT_TIMEOUT"' and s.kind = 'event' and s.state = 'TIMED_OUT'
      and not exists (
          select from {schema}.steps later
          where later.task_id = s.task_id and later.kind = 'event' and later.state = 'TIMED_OUT' and later.recorded_at > s.recorded_at
      )
)
select
    h.workflow_id, h.state as was, (a.id is not null or h.retry_call = %(call)s) is true as retried, (select r.id from rival r) as other, false as is_moved,
    case when a.id is not null and (select pg_notification_queue_usage()) < 0.5 then pg_notify(%(channel)s, 't:' || left(a.queue, 1000)) end
from held h left join again a on a.id = h.id
union all
select m.workflow_id, m.state, false, null, true, null
from {schema}.history m
where m.id = %(id)s and not exists (select from held)
