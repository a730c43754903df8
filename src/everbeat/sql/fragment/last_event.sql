-- The time of the last event of each task `t`: `event.at`.
cross join lateral (
    select
        greatest(
            t.sent_at, t.claimed_at, t.started_at, t.progress_at, t.completed_at, t.failed_at, t.cancelled_at, t.expired_at,
            t.cancel_requested_at, case when t.enqueued_at <= statement_timestamp() then t.enqueued_at end,
            case when t.state = 'PENDING' and t.attempt > 0 then (
                select a.ended_at from {schema}.attempts a where a.task_id = t.id order by a.attempt desc limit 1
            ) end
        ) as at
) event
