-- Delete all lines and gates, because there are no tasks.
create function {schema}.clear_lines() returns trigger language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    delete from {schema}.line_changes;
    delete from {schema}.lines;
    delete from {schema}.gates;
    return null;
end
$$
