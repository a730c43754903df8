-- A supervisor announces itself; repeatable.
insert into {schema}.supervisors (
    id, hostname, pid, boot_id, pid_namespace, process_started, machine_id, lock_key, session_name, lock_file, metadata
)
values (
    %(id)s, %(hostname)s, %(pid)s, %(boot_id)s, %(pid_namespace)s, %(process_started)s, %(machine_id)s, %(lock_key)s, %(session_name)s,
    %(lock_file)s, %(metadata)s::json
)
on conflict (id) do update set last_beat_at = statement_timestamp()
returning id
