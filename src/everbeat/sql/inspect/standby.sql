-- Whether this server is a standby, and how old the last commit is that it has replayed. On a standby, pg_locks and pg_stat_activity
-- show no tree, and beats arrive with the delay of replication.
select
    pg_is_in_recovery() as is_standby,
    extract(epoch from statement_timestamp() - pg_last_xact_replay_timestamp())::float8 as replayed_s
