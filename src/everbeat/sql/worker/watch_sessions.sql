-- Which supervisors still hold their session lock, and whether any session of their tree is left. Reads pg_locks, never waits.
-- The server is as old as its start, or its promotion, which the last transaction that it replayed tells.
select
    s.id, s.beat_seq, s.session_at,
    (extract(epoch from statement_timestamp() - s.session_at) * 1000)::bigint as session_age_ms,
    s.session_held,
    exists (
        select from pg_locks l
        where l.locktype = 'advisory' and l.granted and l.objsubid = 1
          and l.database = (select oid from pg_database where datname = current_database())
          and l.classid::bigint = ((s.lock_key >> 32) & 4294967295) and l.objid::bigint = (s.lock_key & 4294967295)
    ) as locked,
    (select count(*) from pg_stat_activity a where split_part(a.application_name, ' ', 1) = s.session_name) as sessions,
    (extract(epoch from statement_timestamp() - greatest(pg_postmaster_start_time(), pg_last_xact_replay_timestamp())) * 1000)::bigint
        as server_age_ms
from {schema}.supervisors s
where s.ended_at is null
