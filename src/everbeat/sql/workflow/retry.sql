-- An operator's retry: FAILED | CANCELLED -> RUNNING, and PAUSED as well; repeatable by the id of the call. What completed stays completed.
-- Nodes that ended badly begin again; nodes that were skipped for it, or were ready by it, wait again; a child that failed is retried in
-- the same way. A child itself is retried only where it paused by itself, and its parent still waits for it. One key has one that lives.
with recursive root as (
    update {schema}.workflows w
    set state = 'RUNNING', ended_at = null, error = null, result = null, paused_at = null, is_held = false, cancel_requested_at = null,
        retry_call = %(call)s
    where w.id = %(id)s and w.retry_call is distinct from %(call)s
      and (w.state = 'PAUSED' and not w.is_held or w.state in ('FAILED', 'CANCELLED') and w.parent_id is null)
      and not exists (
          select from {schema}.workflows o
          where o.name = w.name and o.key = w.key and o.id <> w.id and o.state in ('RUNNING', 'PAUSED', 'CANCELLING')
      )
    returning w.id
), tree as (
    select r.id from root r
    union
    select c.id
    from tree t
    join {schema}.nodes n on n.workflow_id = t.id and n.kind = 'workflow' and n.state in ('FAILED', 'CANCELLED')
    join {schema}.workflows c on c.id = n.task_id and c.state in ('FAILED', 'CANCELLED')
), child as (
    update {schema}.workflows w
    set state = 'RUNNING', ended_at = null, error = null, result = null, paused_at = null, cancel_requested_at = null
    where w.id in (select t.id from tree t except select r.id from root r)
    returning w.id
), again as (
    update {schema}.nodes n
    set state = case
            when n.kind = 'map' and n.members is not null then 'ENQUEUED'
            when n.kind = 'workflow' and n.task_id in (select t.id from tree t) then 'ENQUEUED'
            else 'PENDING'
        end,
        ended_at = null, error = null
    from tree t
    where n.workflow_id = t.id and n.state in ('FAILED', 'CANCELLED', 'EXPIRED', 'SKIPPED') and (n.kind <> 'task' or n.task is not null)
    returning n.workflow_id, n.number
), opened as (
    update {schema}.edges e
    set state = 'OPEN'
    from again a
    where e.workflow_id = a.workflow_id and e.parent = a.number and e.state <> 'OPEN'
      and exists (
          select from {schema}.nodes c
          where c.workflow_id = e.workflow_id and c.number = e.child
            and c.state in ('PENDING', 'READY', 'FAILED', 'CANCELLED', 'EXPIRED', 'SKIPPED')
      )
    returning e.workflow_id, e.child
), waiting as (
    update {schema}.nodes n
    set state = 'PENDING'
    from (select distinct o.workflow_id, o.child from opened o) o
    where n.workflow_id = o.workflow_id and n.number = o.child and n.state = 'READY'
), happened as (
    insert into {schema}.outbox (workflow_id, node) select t.id, null from tree t
)
select
    w.state as was, w.parent_id is not null as is_child, (exists (select from root) or w.retry_call = %(call)s) is true as retried,
    (
        select o.id from {schema}.workflows o
        where o.name = w.name and o.key = w.key and o.id <> w.id and o.state in ('RUNNING', 'PAUSED', 'CANCELLING')
    ) as other,
    case when exists (select from root) and (select pg_notification_queue_usage()) < 0.5 then pg_notify(%(channel)s, 'w') end
from {schema}.workflows w where w.id = %(id)s
