-- Each lease with its holder and the facts for a recovery decision. Ages are by the database's clock. An ended holder's last sign of life
-- is never later than its end, even if its supervisor continues to send heartbeats. The holder of an orphaned lease is not registered, so
-- the holder's columns are null. A time that is not plausible proves no life. Without a plausible time, the last sign of life is the year
-- 2. The holder's tree recorded the silence after which its leases are stale. That value is null for orphans, and for trees that do not
-- record it.
create or replace view {schema}.leases as
select
    t.id, t.claim_id, t.state, t.name, t.claimed_by_worker_id as worker_id, w.supervisor_id, w.hostname, w.pid,
    coalesce({schema}.plausible(t.claimed_at), '0002-01-01 00:00:00+00') as claimed_at, t.started_at,
    life.last_beat_at, t.policy::text as policy, t.flags::text as flags,
    t.retry_count, t.crash_count, t.loss_count, t.cancel_requested_at is not null as cancel_requested, t.attempt, t.fence,
    w.beat_seq as worker_seq, w.ended_how, w.ended_cause, w.ended_at,
    (extract(epoch from statement_timestamp() - life.last_beat_at) * 1000)::bigint as silent_ms,
    s.beat_seq as supervisor_seq, w.exit_code, w.signal,
    t.queue, t.alone, t.suspect, t.progress_at, t.progress::text as progress, t.serial,
    (select x.rss_bytes from {schema}.worker_states x where x.worker_id = w.id order by x.at desc limit 1) as last_rss_bytes,
    s.claimed_stale_ms, s.running_stale_ms
from {schema}.tasks t
left join {schema}.workers w on w.id = t.claimed_by_worker_id
left join {schema}.supervisors s on s.id = w.supervisor_id
cross join lateral (
    select coalesce(
        least(
            greatest(
                {schema}.plausible(s.last_beat_at), {schema}.plausible(w.last_beat_at), {schema}.plausible(t.claimed_at),
                {schema}.plausible(t.started_at)
            ),
            {schema}.plausible(w.ended_at)
        ),
        '0002-01-01 00:00:00+00'
    ) as last_beat_at
) life
where t.state in ('CLAIMED', 'RUNNING')
