-- Return the server's version, whether it is read-only, and the session's process id. A new process runs this once for each connection.
select
    current_setting('server_version_num')::integer as version,
    pg_is_in_recovery() or current_setting('transaction_read_only')::boolean as read_only,
    pg_backend_pid() as backend_pid
