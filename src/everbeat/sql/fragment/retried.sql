-- The assignments that retry a task `t` on behalf of an operator, with new budgets. `later.is_marked` keeps the mark of a task that this
-- version must not run. `claim_id` is already null. It is set because PostgreSQL checks constraints on the version that the statement's
-- snapshot shows. If the statement waited for a settle, that version still holds a lease.
state = 'PENDING', claim_id = null, enqueued_at = statement_timestamp(), next_retry_at = null, good_until = null,
    counted_from = t.attempt, retry_count = 0, crash_count = 0, loss_count = 0, cancel_requested_at = null,
    failed_at = null, cancelled_at = null, expired_at = null, error = null, progress = null,
    claimed_at = null, claimed_by_worker_id = null, started_at = null, suspect = false, waits_for = null, wake_at = null,
    needs = case when later.is_marked then t.needs end, needs_id = case when later.is_marked then t.needs_id end, retry_call = %(call)s,
    serial_at = case when t.serial is not null then statement_timestamp() end
