-- Return the process id of this session's backend and the time at which the backend started.
select pid, extract(epoch from backend_start)::float8 as started_at from pg_stat_activity where pid = pg_backend_pid()
