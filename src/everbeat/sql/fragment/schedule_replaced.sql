-- The assignments that replace a stored schedule `s` by a definition. Ticks before now stay as they were decided if the timing changes, or if
-- the schedule had ended. An equal definition only ends the retirement. If another version of the code omitted the schedule meanwhile
-- (UNDECLARED), its ticks until now are not sent.
task = excluded.task, args = excluded.args, queue = excluded.queue, priority = excluded.priority, key = excluded.key,
    policy = excluded.policy, flags = excluded.flags, serial = excluded.serial, expires_ms = excluded.expires_ms, timing = excluded.timing,
    timezone = excluded.timezone, starts_at = excluded.starts_at, ends_at = excluded.ends_at, most_runs = excluded.most_runs,
    missed = excluded.missed, most = excluded.most, catchup_ms = excluded.catchup_ms, overlap = excluded.overlap,
    jitter_ms = excluded.jitter_ms, pause_after_failures = excluded.pause_after_failures, note = excluded.note,
    gates = excluded.gates, costs = excluded.costs, labels = excluded.labels,
    owner = excluded.owner, declaration = excluded.declaration,
    changed_at = greatest(statement_timestamp(), s.changed_at + interval '1 microsecond'),
    decided_to = case
        when s.timing::text <> excluded.timing::text then statement_timestamp()
        when s.ended_at is not null and s.declaration is distinct from excluded.declaration then statement_timestamp()
        else s.decided_to
    end,
    ended_at = case when s.declaration is not distinct from excluded.declaration then s.ended_at end,
    next_at = case
        when s.ended_at is not null and s.declaration is not distinct from excluded.declaration then null
        when s.paused_at is not null then s.resume_at
        else statement_timestamp()
    end,
    held_until = case when s.retired_because = 'UNDECLARED' then greatest(s.held_until, statement_timestamp()) else s.held_until end,
    held_because = case when s.retired_because = 'UNDECLARED' then 'RETIRED' else s.held_because end,
    retired_at = null, retired_because = null
