-- Delete all lines, gates and keys, because there are no tasks.
create or replace function {schema}.clear_lines() returns trigger language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    delete from {schema}.line_changes;
    delete from {schema}.lines;
    delete from {schema}.gates;
    delete from {schema}.unique_keys;
    return null;
end
$$
