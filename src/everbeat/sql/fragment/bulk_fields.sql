-- The columns of a bulk action `b`, in the order in which store/bulk.py reads them.
    b.id, b.action, b.filters::text as filters, b.parameters::text as parameters, b.state, b.requested_by, b.origin, b.requested_at,
    b.started_at, b.ended_at, b.cancel_requested_at, b.cancelled_by, b.changed_at, b.carried_out_by, b.examined, b.matched, b.done,
    b.skipped, b.reasons::text as reasons, b.examples::text as examples, b.problem
