-- The columns of a schedule `s` and its latest tick, in the order in which store/schedules.py reads them.
    s.name,
    case
        when s.ended_at is not null then 'ENDED' when s.retired_at is not null then 'RETIRED' when s.paused_at is not null then 'PAUSED'
        else 'ACTIVE'
    end as state,
    s.task, s.args::text as args, s.queue, s.priority, s.key, s.serial, s.note, s.owner, s.created_at, s.changed_at, s.decided_to, s.next_at,
    s.runs, s.paused_at, s.paused_by, s.pause_reason, s.resume_at, s.retired_at, s.retired_because, s.ended_at, s.held_until, s.held_because,
    statement_timestamp() as read_at,
    s.timing::text as timing, s.missed, s.most, s.catchup_ms, s.overlap, s.jitter_ms, s.starts_at, s.ends_at, s.most_runs,
    s.pause_after_failures, s.expires_ms,
    k.schedule, k.at, k.outcome, k.task_id, k.reason, k.detail, k.last_at, k.missed as missed_ticks, k.decided_at, k.decided_by,
    coalesce(
        (select t.state from {schema}.tasks t where t.id = k.task_id), (select h.state from {schema}.history h where h.id = k.task_id)
    ) as task_state
