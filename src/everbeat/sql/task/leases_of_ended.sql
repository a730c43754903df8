-- The leases of ended workers in these states, whoever they were, oldest first, after the last one of the page before: every sweep
-- revisits them. Those of a process that its own supervisor saw end are left to that supervisor, which alone knows who shared it, while
-- it is not ended and the end not older than owner_ms; what a hook left is anybody's to offer again.
select
    l.id, l.claim_id, l.state, l.name, l.worker_id, l.supervisor_id, l.hostname, l.pid, l.claimed_at, l.started_at, l.last_beat_at, l.policy,
    l.flags, l.retry_count, l.crash_count, l.loss_count, l.cancel_requested, l.attempt, l.fence, l.worker_seq, l.ended_how, l.ended_cause,
    l.ended_at, l.silent_ms, l.supervisor_seq, l.exit_code, l.signal, l.queue, l.alone, l.suspect, l.progress_at, l.progress, l.serial,
    l.last_rss_bytes, l.claimed_stale_ms, l.running_stale_ms
from {schema}.leases l
where l.ended_at is not null and l.state = any(%(states)s::text[])
  and (%(after_id)s::uuid is null or (l.claimed_at, l.id) > (%(after_at)s::timestamptz, %(after_id)s::uuid))
  and (
      l.ended_how = 'child_exit'
      and l.ended_at > statement_timestamp() - %(owner_ms)s::bigint * interval '1 millisecond'
      and exists (select from {schema}.supervisors s where s.id = l.supervisor_id and s.ended_at is null)
      and not exists (select from {schema}.tasks t where t.id = l.id and t.left_claim_id = l.claim_id)
  ) is not true
order by l.claimed_at, l.id limit %(limit)s
