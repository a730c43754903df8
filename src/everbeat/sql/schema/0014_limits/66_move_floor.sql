-- Move the floor of the changes, but never above a transaction that is still running. A sequence has separate rights, so roles with rights on
-- the tables alone move it through this function.
create function {schema}.move_floor(p_to bigint) returns void
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    perform setval('{schema}.line_changes_floor', least(p_to, pg_snapshot_xmin(pg_current_snapshot())::text::bigint));
end
$$
