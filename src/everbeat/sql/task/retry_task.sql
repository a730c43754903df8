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
    set {fragment/retried}
    from held h
    {fragment/later_mark}
    where t.id = h.id and h.state in ('FAILED', 'CANCELLED', 'EXPIRED') and h.workflow_id is null and h.retry_call is distinct from %(call)s
      and not exists (select from rival)
    returning t.id, t.queue
), anew as (
    {fragment/forget_timed_out_wait}
)
select
    h.workflow_id, h.state as was, (a.id is not null or h.retry_call = %(call)s) is true as retried, (select r.id from rival r) as other, false as is_moved,
    case when a.id is not null and (select pg_notification_queue_usage()) < 0.5 then pg_notify(%(channel)s, 't:' || left(a.queue, 1000)) end
from held h left join again a on a.id = h.id
union all
select m.workflow_id, m.state, false, null, true, null
from {schema}.history m
where m.id = %(id)s and not exists (select from held)
