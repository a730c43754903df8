-- Return the server's version and those of its settings that affect performance.
select name, current_setting(name)
from pg_settings
where name in (
    'autovacuum', 'commit_delay', 'fsync', 'full_page_writes', 'huge_pages', 'jit', 'max_connections', 'max_wal_size', 'server_version',
    'shared_buffers', 'synchronous_commit', 'synchronous_standby_names', 'wal_compression', 'wal_level', 'wal_sync_method', 'work_mem'
)
order by name
