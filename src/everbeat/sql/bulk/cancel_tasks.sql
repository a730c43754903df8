-- Cancel the tasks of one portion of a bulk action, as task/cancel_task: PENDING | CLAIMED -> CANCELLED at once; for RUNNING tasks, request a
-- cancel. Tasks that another session has locked are not returned. Otherwise, return each task with a null, or with the reason why it was
-- skipped, and whether it can have children. A task whose code has never started has none.
with held as materialized (
    select t.id, t.state, t.attempt, t.queue, t.serial, t.workflow_id, t.node from {schema}.tasks t
    where t.id = any(%(ids)s::text::uuid[])
    order by t.id
    for no key update skip locked
), ended as (
    update {schema}.tasks t
    set state = 'CANCELLED', cancelled_at = statement_timestamp(), cancel_requested_at = coalesce(t.cancel_requested_at, statement_timestamp()),
        claim_id = null, claim_call = %(call)s, next_retry_at = null,
        error = json_build_object(
            'code', 'TASK_CANCELLED',
            'message', case when h.attempt = 0 then 'cancelled before its code started' else 'cancelled before its code started again' end)
    from held h
    where t.id = h.id and h.state in ('PENDING', 'CLAIMED') and h.state = any(%(applicable)s::text[])
    returning t.id, t.queue, t.serial, coalesce(t.workflow_id, t.batch_id) as whole_id, h.state as was
), asked as (
    update {schema}.tasks t
    set cancel_requested_at = coalesce(t.cancel_requested_at, statement_timestamp())
    from held h
    where t.id = h.id and h.state = 'RUNNING' and h.state = any(%(applicable)s::text[])
    returning t.id
), {fragment/notify_of_cancelled}
select
    h.id,
    case when e.id is null and a.id is null then 'CHANGED' end as refusal,
    h.state = 'RUNNING' or h.attempt > 0 and (
        exists (select from {schema}.all_tasks c where c.parent_id = h.id)
        or exists (select from {schema}.workflows w where w.parent_task_id = h.id)
        or h.workflow_id is not null and exists (select from {schema}.steps s where s.task_id = h.id and s.kind = 'child')
    ) as has_family,
    (select x.hints from hint x) as hints
from held h
left join ended e on e.id = h.id
left join asked a on a.id = h.id
