-- Which supervisors still hold their session lock, and whether any session of their tree is left. Reads pg_locks, never waits.
-- Only sessions of the tree's own role count: any role may bear any application_name and take any advisory lock.
-- held_here: it took its lock on this incarnation of the server, so that a lock that is missing here was freed here.
-- lost_in_crash: a crash of the server ends all sessions, and the server process stays. It discards the statistics of the cluster, which
-- every role can see. An operator may reset those of one view, so the older of two moments counts. They are read only if needed.
-- beats_here: a backend that works on a statement may have lost its client. Other roles do not see that: for them it is connected.
with connected as materialized (
    select
        a.pid, a.usesysid as role, split_part(a.application_name, ' ', 1) as tree,
        split_part(a.application_name, ' ', 3) = 'beats'
            and (a.state = 'active' and a.wait_event_type is distinct from 'Client') is not true as beats
    from pg_stat_activity a
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
    s.id, s.beat_seq, s.session_at,
    coalesce(s.session_held and s.session_server = h.incarnation, false) as held_here,
    tree.locked, tree.sessions,
    s.last_beat_at > statement_timestamp() - %(silence_kept_ms)s * interval '1 millisecond' as beat_lately,
    case
        when tree.locked or tree.sessions > 0 then false
        else coalesce(s.session_at < (select least(b.stats_reset, r.stats_reset) from pg_stat_bgwriter b, pg_stat_archiver r), false)
    end as lost_in_crash,
    tree.beats as beats_here, coalesce(s.session_held, false) as session_held
from {schema}.supervisors s
cross join here h
cross join lateral (
    select
        exists (select from locks l where l.key = s.lock_key and l.role = coalesce(s.session_role, l.role)) as locked,
        count(*) as sessions, coalesce(bool_or(c.beats), false) as beats
    from connected c
    where c.tree = s.session_name and c.role = coalesce(s.session_role, c.role)
) tree
where s.ended_at is null
