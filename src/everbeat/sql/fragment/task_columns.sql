-- The columns of a task, in the order in which store/inspection.py reads them.
    t.id, t.name, t.queue, t.priority, t.state, coalesce(t.key, t.unique_key) as key, t.attempt, t.fence, t.retry_count, t.crash_count, t.loss_count, t.claimed_by_worker_id,
    t.sent_at, t.enqueued_at, t.claimed_at, t.started_at, t.completed_at, t.failed_at, t.cancelled_at, t.expired_at, t.next_retry_at,
    t.good_until, t.cancel_requested_at, t.progress::text, t.error::text, t.progress_at,
    case when t.gates is null or not starts_with(t.serial, 'limit:') then t.serial end as serial, t.suspect, t.workflow_id,
    (select n.name from {schema}.nodes n where n.workflow_id = t.workflow_id and n.number = t.node) as node, t.parent_id,
    case when t.state = 'PENDING' then t.waits_for end as waits_for, case when t.state = 'PENDING' then t.wake_at end as wake_at,
    event.at as last_event_at,
    case when t.wake_at is not null and t.waits_for is null and (t.state = 'PENDING' or t.state = 'RUNNING' and t.wake_at > statement_timestamp()) then (
        select s.result::text from {schema}.steps s
        where s.task_id = t.id and s.kind = 'sleep' and s.due_at = t.wake_at and s.result is not null
        order by s.name limit 1
    ) end as failed_try,
    t.labels::text as labels
