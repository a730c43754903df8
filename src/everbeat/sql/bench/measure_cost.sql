-- Return how many transactions this database has run and how many bytes of WAL the server has written so far.
select
    (select xact_commit + xact_rollback from pg_stat_database where datname = current_database()) as transactions,
    pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::float8 as wal_bytes
