-- A supervisor announces itself; repeatable.
insert into {schema}.supervisors (id, hostname, pid, boot_id, pid_namespace, process_started, lock_key, session_name, metadata)
values (%(id)s, %(hostname)s, %(pid)s, %(boot_id)s, %(pid_namespace)s, %(process_started)s, %(lock_key)s, %(session_name)s, %(metadata)s::json)
on conflict (id) do update set last_beat_at = statement_timestamp()
returning id
