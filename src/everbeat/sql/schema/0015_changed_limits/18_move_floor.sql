-- Move the floor of the changes, but never above a transaction that is still running. A sequence has separate rights, so roles with rights on
-- the tables alone move it through this function.
create or replace function {schema}.move_floor(p_to bigint) returns void
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    if not {schema}.caller_can('DELETE', '{schema}.line_changes') then
        raise insufficient_privilege using message = 'permission denied to move the floor of line_changes: it needs DELETE on this table';
    end if;
    perform setval('{schema}.line_changes_floor', least(p_to, pg_snapshot_xmin(pg_current_snapshot())::text::bigint));
end
$$
