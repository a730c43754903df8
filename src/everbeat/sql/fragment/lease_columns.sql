-- The columns of a lease, in the order in which store/leases.py reads them.
    l.id, l.claim_id, l.state, l.name, l.worker_id, l.supervisor_id, l.hostname, l.pid, l.claimed_at, l.started_at, l.last_beat_at, l.policy,
    l.flags, l.retry_count, l.crash_count, l.loss_count, l.cancel_requested, l.attempt, l.fence, l.worker_seq, l.ended_how, l.ended_cause,
    l.ended_at, l.silent_ms, l.supervisor_seq, l.exit_code, l.signal, l.queue, l.alone, l.suspect, l.progress_at, l.progress, l.serial,
    l.last_rss_bytes, l.claimed_stale_ms, l.running_stale_ms
