-- Return the trees and workers that lived at a moment, in the form of a sample of the pulse. Those that had ended within `window_ms` before
-- are added. The ends after that moment are left out. A last heartbeat comes from the history of heartbeats, which beats_by_time serves.
-- If that history begins later, the tree counts as if it had just beaten. Snapshots are found by worker_states_by_worker. The
-- tables of supervisors and workers are read as a whole; they have thousands of rows at most.
with moment as materialized (
    select %(at)s::timestamptz as at, (select min(b.sent_at) from {schema}.beats b) as beats_since
), beats as materialized (
    select b.supervisor_id, max(b.sent_at) as sent_at, max(b.seq) as seq
    from {schema}.beats b
    where b.sent_at > %(at)s::timestamptz - %(window_ms)s * interval '1 millisecond' and b.sent_at <= %(at)s
    group by b.supervisor_id
), lived as materialized (
    select
        s.id, s.hostname, s.pid, s.slot, s.beat_ms, s.claimed_stale_ms, s.running_stale_ms, s.processes, s.code,
        coalesce({schema}.plausible(s.started_at), '0002-01-01 00:00:00+00') as started_at,
        case when s.ended_at <= m.at then coalesce({schema}.plausible(s.ended_at), m.at) end as ended_at,
        case when s.ended_at <= m.at then s.ended_how end as ended_how,
        case when s.quiet_since <= m.at then coalesce({schema}.plausible(s.quiet_since), m.at) end as quiet_since,
        coalesce(b.seq, 0) as beat_seq, false as draining, coalesce(s.session_held, false) as session_held, false as held_here, false as locked, 0 as sessions,
        coalesce(
            b.sent_at, case when m.beats_since is null or m.beats_since > m.at - interval '1 minute' then m.at end,
            {schema}.plausible(least(s.last_beat_at, s.started_at)), m.at
        ) as last_beat_at
    from {schema}.supervisors s
    cross join moment m
    left join beats b on b.supervisor_id = s.id
    where s.started_at <= m.at and (s.ended_at is null or s.ended_at > m.at - %(window_ms)s * interval '1 millisecond')
    order by s.id
    limit %(limit)s
), crew as materialized (
    select
        w.supervisor_id, w.id, w.pid, case when w.queues is not null then array(select q from unnest(w.queues) q where q is not null) end as queues,
        coalesce({schema}.plausible(w.started_at), '0002-01-01 00:00:00+00') as started_at,
        coalesce(snapshot.tasks_claimed, 0) as claimed, coalesce(snapshot.tasks_running, 0) as running, snapshot.slots, snapshot.rss_bytes,
        snapshot.cpu_percent, snapshot.loop_lag_ms, {schema}.plausible(snapshot.at) as snapshot_at,
        case when w.ended_at <= m.at then coalesce({schema}.plausible(w.ended_at), m.at) end as ended_at,
        case when w.ended_at <= m.at then w.ended_how end as ended_how, case when w.ended_at <= m.at then w.ended_cause end as ended_cause
    from lived l
    join {schema}.workers w on w.supervisor_id = l.id
    cross join moment m
    left join lateral (
        select
            x.tasks_claimed, x.tasks_running, x.slots, x.rss_bytes, x.at, case when x.cpu_percent between 0 and 1e6 then x.cpu_percent end as cpu_percent,
            case when x.loop_lag_ms between 0 and 1e9 then x.loop_lag_ms end as loop_lag_ms
        from {schema}.worker_states x
        where x.worker_id = w.id and x.at <= m.at
        order by x.at desc
        limit 1
    ) snapshot on true
    where w.started_at <= m.at and (w.ended_at is null or w.ended_at > m.at - %(window_ms)s * interval '1 millisecond')
)
select
    m.at, pg_is_in_recovery() as is_standby, (select json_agg(l.* order by l.id) from lived l)::text as trees,
    (select json_agg(c.* order by c.id) from crew c)::text as workers, m.beats_since
from moment m
