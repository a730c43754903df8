-- Put a new task with gates into its line.
create function {schema}.place_sent_task() returns trigger language plpgsql as $$
begin
    select p.needs, p.needs_id, p.serial, p.serial_at into new.needs, new.needs_id, new.serial, new.serial_at
    from {schema}.place_in_line(new) p;
    return new;
end
$$
