-- What kind of server this is: asked once per connection of a new process.
select
    current_setting('server_version_num')::integer as version,
    pg_is_in_recovery() or current_setting('transaction_read_only')::boolean as read_only,
    pg_backend_pid() as backend_pid
