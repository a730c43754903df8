-- Tasks, newest id first; a page ends where the next one begins (before). Ids of a workflow's tasks begin as its own: from first_id to last_id.
select
    t.id, t.name, t.queue, t.priority, t.state, t.key, t.attempt, t.fence, t.retry_count, t.crash_count, t.loss_count, t.claimed_by_worker_id,
    t.sent_at, t.enqueued_at, t.claimed_at, t.started_at, t.completed_at, t.failed_at, t.cancelled_at, t.expired_at, t.next_retry_at,
    t.good_until, t.cancel_requested_at, t.progress::text, t.error::text, t.progress_at, t.serial, t.suspect, t.workflow_id,
    (select n.name from {schema}.nodes n where n.workflow_id = t.workflow_id and n.number = t.node) as node, t.parent_id,
    case when t.state = 'PENDING' then t.waits_for end as waits_for, case when t.state = 'PENDING' then t.wake_at end as wake_at
from {schema}.tasks t
where (%(states)s::text[] is null or t.state = any(%(states)s::text[]))
  and (%(name)s::text is null or t.name = %(name)s)
  and (%(queue)s::text is null or t.queue = %(queue)s)
  and (%(parent)s::uuid is null or t.parent_id = %(parent)s)
  and (%(before)s::uuid is null or t.id < %(before)s)
  and (%(workflow)s::uuid is null or t.workflow_id = %(workflow)s)
  and t.id >= %(first_id)s and t.id <= %(last_id)s
order by t.id desc
limit %(limit)s
