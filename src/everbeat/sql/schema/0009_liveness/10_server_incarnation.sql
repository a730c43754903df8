-- The incarnation of the server: its start time, and the timeline, which a promotion changes; null on a standby. A session, and therefore a
-- session lock, never outlives the incarnation in which it was opened. The function needs no privileges; pg_control_checkpoint() lags
-- behind a promotion. Some managed servers do not allow the functions of the write-ahead log. There, the start time alone is the
-- incarnation.
create function {schema}.server_incarnation() returns text language plpgsql volatile as $$
begin
    if pg_is_in_recovery() then
        return null;
    end if;
    return extract(epoch from pg_postmaster_start_time()) || '/' || left(pg_walfile_name(pg_current_wal_lsn()), 8);
exception when object_not_in_prerequisite_state or feature_not_supported or insufficient_privilege or undefined_function then
    return extract(epoch from pg_postmaster_start_time())::text;
end
$$
