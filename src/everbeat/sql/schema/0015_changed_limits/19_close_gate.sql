-- Let no task of this gate start before `closed_until`, in seconds since 1970. A gate that is closed for longer stays closed, so a call can be
-- repeated. The caller needs no privileges on the table that is written here, because code can settle its attempt with its own connection.
create or replace function {schema}.close_gate(gate text, closed_until double precision) returns void
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    if not {schema}.caller_can('UPDATE', '{schema}.tasks') then
        raise insufficient_privilege using message = 'permission denied to close a limit: it needs UPDATE on the table tasks';
    end if;
    insert into {schema}.line_changes (gates, closed_until) values (array[gate], closed_until);
end
$$
