-- A batch `b` with its progress. The events that are not processed yet count, too, so the numbers are exact in each snapshot.
    b.id, b.name, b.total + e.total as total, live.waiting, live.running, b.completed + e.completed as completed, b.failed + e.failed as failed,
    b.cancelled + e.cancelled as cancelled, b.expired + e.expired as expired, b.created_at, b.sealed_at, b.cancelled_at, b.ended_at,
    (b.on_end ->> 'id')::uuid as on_end_id, (b.on_success ->> 'id')::uuid as on_success_id, b.problem
