-- Sample the pulse of all trees: heartbeats, session locks, workers, overdue leases, and what happened after the last look. That is the
-- recoveries, and the actions of operators. One sample serves all viewers of a process, and it writes nothing. Trees that have not ended are found by supervisors_live. Of the trees that
-- ended within `window_ms`, only those in `known` are listed, by the primary key; null lists all, which reads the whole table of
-- supervisors. Each worker's leases are counted by tasks_leased, its last snapshot is found by worker_states_by_worker, and new recoveries
-- and new actions by the primary keys.
with {fragment/tree_sessions}
, overdue as materialized (
    {fragment/overdue_leases}
), sampled as materialized (
    select
        s.id, s.hostname, s.pid, s.slot, s.ended_how, s.beat_seq, s.beat_ms, s.claimed_stale_ms, s.running_stale_ms, s.draining, s.processes,
        s.start_problem, s.code,
        coalesce({schema}.plausible(s.started_at), '0002-01-01 00:00:00+00') as started_at,
        coalesce({schema}.plausible(s.last_beat_at), '0002-01-01 00:00:00+00') as last_beat_at,
        case when s.ended_at is not null then coalesce({schema}.plausible(s.ended_at), statement_timestamp()) end as ended_at,
        case when s.quiet_since is not null then coalesce({schema}.plausible(s.quiet_since), statement_timestamp()) end as quiet_since,
        coalesce(s.session_held, false) as session_held,
        coalesce(s.session_held and s.session_server = h.incarnation, false) as held_here, tree.locked, tree.sessions
    from {schema}.supervisors s
    cross join here h
    cross join lateral (
        {fragment/session_of_tree}
    ) tree
    where s.ended_at is null
       or (
           (%(known)s::text[] is null or s.id = any(%(known)s::text[]))
           and s.ended_at > statement_timestamp() - %(window_ms)s * interval '1 millisecond'
       )
), crew as materialized (
    select
        w.supervisor_id, w.id, w.pid, case when w.queues is not null then array(select q from unnest(w.queues) q where q is not null) end as queues,
        w.ended_how, w.ended_cause, w.beat_seq, held.claimed, held.running, snapshot.slots,
        snapshot.rss_bytes, snapshot.cpu_percent, snapshot.loop_lag_ms, {schema}.plausible(snapshot.at) as snapshot_at,
        coalesce({schema}.plausible(w.started_at), '0002-01-01 00:00:00+00') as started_at,
        {schema}.plausible(w.last_beat_at) as last_beat_at,
        case when w.ended_at is not null then coalesce({schema}.plausible(w.ended_at), statement_timestamp()) end as ended_at
    from sampled s
    join {schema}.workers w on w.supervisor_id = s.id
    cross join lateral (
        select count(*) filter (where t.state = 'CLAIMED') as claimed, count(*) filter (where t.state = 'RUNNING') as running
        from {schema}.tasks t
        where t.claimed_by_worker_id = w.id and t.state in ('CLAIMED', 'RUNNING')
    ) held
    left join lateral (
        select
            x.slots, x.rss_bytes, x.at, case when x.cpu_percent between 0 and 1e6 then x.cpu_percent end as cpu_percent,
            case when x.loop_lag_ms between 0 and 1e9 then x.loop_lag_ms end as loop_lag_ms
        from {schema}.worker_states x
        where x.worker_id = w.id
        order by x.at desc
        limit 1
    ) snapshot on true
    where w.ended_at is null or w.ended_at > statement_timestamp() - %(window_ms)s * interval '1 millisecond'
), fresh as materialized (
    select
        r.id, r.task_id, r.name, r.worker_id, r.supervisor_id, r.was, r.cause, r.noticed_by, r.noticed_after_ms, r.action, r.recovered_by,
        coalesce({schema}.plausible(r.noticed_at), statement_timestamp()) as noticed_at
    from {schema}.recoveries r
    where r.id > %(after_recovery)s
    order by r.id desc
    limit %(most_recoveries)s
), acted as materialized (
    {fragment/latest_actions}
)
select
    statement_timestamp() as at, pg_is_in_recovery() as is_standby,
    (select json_agg(s.* order by s.id) from sampled s)::text as trees,
    (select json_agg(c.* order by c.id) from crew c)::text as workers,
    (select json_agg(f.* order by f.id) from fresh f)::text as recoveries,
    (select json_agg(a.* order by a.id) from acted a)::text as actions,
    (select count(*) from overdue o where o.overdue_ms > 0) as overdue,
    (select max(o.overdue_ms) from overdue o where o.overdue_ms > 0) as overdue_ms,
    (select max(r.id) from {schema}.recoveries r) as last_recovery
