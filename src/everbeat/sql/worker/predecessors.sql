-- Supervisors that were not ended and about which somebody who starts on this machine may know more than the database does: they ran
-- under this very kernel, or under another boot of this machine, or in the same slot. With what their sessions say against it.
select
    s.id, s.hostname, s.pid, s.boot_id, s.pid_namespace, s.process_started, s.machine_id, s.session_name, s.lock_file, s.slot,
    s.beat_seq, s.session_at, s.session_held,
    exists (
        select from pg_locks l
        where l.locktype = 'advisory' and l.granted and l.objsubid = 1
          and l.database = (select oid from pg_database where datname = current_database())
          and l.classid::bigint = ((s.lock_key >> 32) & 4294967295) and l.objid::bigint = (s.lock_key & 4294967295)
    ) as locked,
    (select count(*) from pg_stat_activity a where split_part(a.application_name, ' ', 1) = s.session_name) as sessions,
    (extract(epoch from statement_timestamp() - s.last_beat_at) * 1000)::bigint as silent_ms,
    (extract(epoch from statement_timestamp() - greatest(pg_postmaster_start_time(), pg_last_xact_replay_timestamp())) * 1000)::bigint
        as server_age_ms
from {schema}.supervisors s
where s.ended_at is null and s.id <> %(id)s
  and (s.boot_id is not distinct from %(boot_id)s::text or s.machine_id = %(machine_id)s::text or s.slot = %(slot)s::text)
order by s.id
