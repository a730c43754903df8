-- Put a new task with gates into its line. Reject a task that names a gate twice, because claims check each gate against the same room.
create function {schema}.place_sent_task() returns trigger language plpgsql as $$
begin
    if cardinality(new.gates) > 1 and (select count(distinct g) from unnest(new.gates) g) < cardinality(new.gates) then
        raise check_violation using message = format('A task must not name a gate twice: %s', new.gates);
    end if;
    if new.needs is null and new.serial is null then  -- as place_in_line, without its call
        new.needs := '{{"limits": true}}';
        new.needs_id := {schema}.mark_of(new.name, new.needs);
        new.serial := {schema}.line_of(new.queue, new.priority, new.name, new.gates, new.costs, new.needs_id, new.suspect);
        new.serial_at := new.enqueued_at;
    else
        select p.needs, p.needs_id, p.serial, p.serial_at into new.needs, new.needs_id, new.serial, new.serial_at
        from {schema}.place_in_line(new) p;
    end if;
    return new;
end
$$
