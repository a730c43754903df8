-- Return whether this server is a standby, and the age of the last replayed commit. On a standby, pg_locks and pg_stat_activity show no
-- tree, and heartbeats arrive with the delay of replication.
select
    pg_is_in_recovery() as is_standby,
    extract(epoch from statement_timestamp() - pg_last_xact_replay_timestamp())::float8 as replayed_s
