-- What the server has done so far: transactions in this database, and bytes of WAL.
select
    (select xact_commit + xact_rollback from pg_stat_database where datname = current_database()) as transactions,
    pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::float8 as wal_bytes
