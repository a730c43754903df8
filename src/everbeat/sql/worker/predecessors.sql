-- Supervisors that were not ended and about which somebody who starts on this machine may know more than the database does: they ran
-- under this very kernel, or under another boot of this machine, or in the same slot. With what their sessions say against it, as in
-- watch_sessions: sessions of the tree's own role, whether its lock was taken on this incarnation of the server, and whether a crash of
-- the server has ended it since.
with connected as materialized (
    select a.pid, a.usesysid as role, split_part(a.application_name, ' ', 1) as tree from pg_stat_activity a
), locks as materialized (
    select (l.classid::bigint << 32) | l.objid::bigint as key, c.role
    from pg_locks l
    join connected c on c.pid = l.pid
    where l.locktype = 'advisory' and l.granted and l.objsubid = 1
      and l.database = (select oid from pg_database where datname = current_database())
), here as materialized (
    select {schema}.server_incarnation() as incarnation
)
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
