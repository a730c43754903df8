-- The columns of a schedule that its definition sets.
name, task, args, queue, priority, key, policy, flags, serial, expires_ms, timing, timezone, starts_at, ends_at, most_runs, missed, most,
    catchup_ms, overlap, jitter_ms, pause_after_failures, note, declaration, gates, costs, labels
