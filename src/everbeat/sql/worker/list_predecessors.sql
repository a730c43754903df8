-- List supervisors that have not ended and that a supervisor starting on this machine might be able to prove dead. The listed supervisors
-- ran under this kernel, under another boot of this machine, or in the same slot. The columns about sessions help to avoid declaring a live
-- tree dead, as in watch_sessions. These columns show the sessions of the tree's own role; whether the supervisor took its lock on this
-- incarnation of the server; and whether a crash has released the lock since.
with connected as materialized (
    select a.pid, a.usesysid as role, split_part(a.application_name, ' ', 1) as tree from pg_stat_activity a
), {fragment/session_locks}
select
    s.id, s.hostname, s.pid, s.boot_id, s.pid_namespace, s.process_started, s.machine_id, s.session_name, s.lock_file, s.slot,
    s.beat_seq, s.session_at, s.session_held,
    coalesce(s.session_held and s.session_server = h.incarnation, false) as held_here,
    tree.locked, tree.sessions,
    (extract(epoch from statement_timestamp() - coalesce({schema}.plausible(s.last_beat_at), '0002-01-01 00:00:00+00')) * 1000)::bigint as silent_ms,
    case
        when tree.locked or tree.sessions > 0 then false
        else coalesce(s.session_at < (select least(b.stats_reset, r.stats_reset) from pg_stat_bgwriter b, pg_stat_archiver r), false)
    end as lost_in_crash
from {schema}.supervisors s
cross join here h
cross join lateral (
    select
        exists (select from locks l where l.key = s.lock_key and l.role = coalesce(s.session_role, l.role)) as locked,
        count(*) as sessions
    from connected c
    where c.tree = s.session_name and c.role = coalesce(s.session_role, c.role)
) tree
where s.ended_at is null and s.id <> %(id)s
  and (s.boot_id is not distinct from %(boot_id)s::text or s.machine_id = %(machine_id)s::text or s.slot = %(slot)s::text)
order by s.id
