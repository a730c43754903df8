-- Register a supervisor with the role of its tree's connections and its own silence threshold. The statement is idempotent.
insert into {schema}.supervisors (
    id, hostname, pid, boot_id, pid_namespace, process_started, machine_id, lock_key, session_name, lock_file, metadata, session_role,
    quiet_since, code, beat_ms, claimed_stale_ms, running_stale_ms
)
values (
    %(id)s, %(hostname)s, %(pid)s, %(boot_id)s, %(pid_namespace)s, %(process_started)s, %(machine_id)s, %(lock_key)s, %(session_name)s,
    %(lock_file)s, %(metadata)s::json, (select a.usesysid from pg_stat_get_activity(pg_backend_pid()) a),
    case when %(quiet)s then statement_timestamp() end,
    %(code)s, %(beat_ms)s, %(claimed_stale_ms)s, %(running_stale_ms)s
)
on conflict (id) do update set last_beat_at = statement_timestamp(), session_role = excluded.session_role
returning id
