-- Which supervisors still hold their session lock, and whether any session of their tree is left. Reads pg_locks, never waits.
-- Only sessions of the tree's own role count: any role may bear any application_name and take any advisory lock.
-- held_here: it took its lock on this incarnation of the server, so that a lock that is missing here was freed here.
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
    s.id, s.beat_seq, s.session_at,
    coalesce(s.session_held and s.session_server = h.incarnation, false) as held_here,
    exists (select from locks l where l.key = s.lock_key and l.role = coalesce(s.session_role, l.role)) as locked,
    (select count(*) from connected c where c.tree = s.session_name and c.role = coalesce(s.session_role, c.role)) as sessions,
    s.last_beat_at > statement_timestamp() - %(silence_kept_ms)s * interval '1 millisecond' as beat_lately
from {schema}.supervisors s, here h
where s.ended_at is null
