-- Retry the tasks of one portion of a bulk action: FAILED | CANCELLED | EXPIRED -> PENDING, as task/retry_task. `call` is the id of the action,
-- so the action retries each task at most once. A key has at most one live task, so of several tasks with one key, only the first is retried.
-- Tasks that another session has locked are not returned. Otherwise, return each task with a null, or with the reason why it was skipped.
with held as materialized (
    select t.* from {schema}.tasks t where t.id = any(%(ids)s::text::uuid[]) order by t.id for no key update skip locked
), judged as materialized (
    select
        h.id,
        case
            when h.workflow_id is not null then 'WORKFLOW'
            when h.state not in ('FAILED', 'CANCELLED', 'EXPIRED') or h.retry_call is not distinct from %(call)s
                or greatest(h.completed_at, h.failed_at, h.cancelled_at, h.expired_at) > %(requested_at)s then 'CHANGED'
            when h.key is not null and exists (
                select from {schema}.tasks o
                where o.name = h.name and o.key = h.key and o.id <> h.id and o.state in ('PENDING', 'CLAIMED', 'RUNNING')
            ) then 'KEY_TAKEN'
            when h.unique_key is not null and exists (
                select from {schema}.unique_keys u
                where u.name = h.name and u.key = h.unique_key and u.task_id <> h.id and (u.until is null or u.until > statement_timestamp())
            ) then 'KEY_TAKEN'
        end as refusal
    from held h
), fit as materialized (
    select
        h.id,
        h.key is not null and row_number() over (partition by h.name, h.key order by h.id) > 1
            or h.unique_key is not null and row_number() over (partition by h.name, h.unique_key order by h.id) > 1 as is_second
    from held h
    join judged j on j.id = h.id and j.refusal is null
), again as (
    update {schema}.tasks t
    set {fragment/retried}
    from held h
    {fragment/later_mark}
    where t.id = h.id and h.id = any(array(select f.id from fit f where not f.is_second))
    returning t.id, t.queue
), anew as (
    {fragment/forget_timed_out_wait}
), hint as materialized (
    select count(pg_notify(%(channel)s, 't:' || left(q.queue, 1000))) filter (where (select pg_notification_queue_usage()) < 0.5) as hints
    from (select distinct a.queue from again a) q
)
select j.id, case when f.is_second then 'KEY_TAKEN' else j.refusal end as refusal, (select h.hints from hint h) as hints
from judged j
left join fit f on f.id = j.id
