-- The function of version 15, which early copies of that version did not have in this form.
-- Number a change of a limit. A limit that is declared anew continues after the versions that its gates know.
create or replace function {schema}.number_limit() returns trigger language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    new.version := 1 + greatest(
        case when tg_op = 'UPDATE' then old.version end,
        (select g.version from {schema}.gates g where g.limit_name = new.name order by g.version desc limit 1), 0
    );
    new.changed_at := clock_timestamp();
    new.has_old_gates := true;
    if tg_op = 'INSERT' then
        new.has_old_lines := true;
    else
        new.has_old_lines := old.has_old_lines
            or (old.fair, old.weights::text, old.when_full) is distinct from (new.fair, new.weights::text, new.when_full);
    end if;
    return new;
end
$$
