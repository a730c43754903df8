-- The incarnation of the server: its start, and the timeline that a promotion changes; null on a standby. A session, and so a session
-- lock, never outlives the incarnation in which it was opened. Needs no privilege; pg_control_checkpoint() lags behind a promotion.
create function {schema}.server_incarnation() returns text language sql volatile as $$
    select case
        when not pg_is_in_recovery()
            then extract(epoch from pg_postmaster_start_time()) || '/' || left(pg_walfile_name(pg_current_wal_lsn()), 8)
    end
$$
