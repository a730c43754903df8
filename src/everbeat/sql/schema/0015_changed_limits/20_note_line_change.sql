-- Note a change of a task that is or was in a line. Move a waiting task with gates to its new line or place. No other row is locked, so
-- there is no order to keep, no waiting and no deadlock. The sender needs no privileges on the tables that are written here.
create or replace function {schema}.note_line_change() returns trigger language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    placed record;
    was_held boolean;
begin
    if tg_op = 'INSERT' then
        insert into {schema}.line_changes (line, at) values (new.serial, new.serial_at);
        return null;
    end if;
    was_held := old.state in ('CLAIMED', 'RUNNING');
    if tg_op = 'DELETE' then
        insert into {schema}.line_changes (line, gates, costs, freed)
        values (old.serial, old.gates, old.costs, old.gates is not null and was_held);
        return null;
    end if;
    if was_held and old.gates is not null then
        insert into {schema}.line_changes (gates, costs, freed) values (old.gates, old.costs, true);
    end if;
    if new.state = 'PENDING' and new.gates is not null then
        placed := {schema}.place_in_line(new);
        if (placed.serial, placed.serial_at, placed.needs_id) is distinct from (new.serial, new.serial_at, new.needs_id) then
            update {schema}.tasks t
            set serial = placed.serial, serial_at = placed.serial_at, needs = placed.needs, needs_id = placed.needs_id
            where t.id = new.id;  -- this update fires the trigger again
            insert into {schema}.line_changes (line) select old.serial where not was_held;
            return null;
        end if;
    end if;
    -- Only the state of a strict line depends on a task that a claim holds or held. Every line depends on a task that ends without a claim,
    -- and so do its gates, which keep permits for the first line that waits.
    if not was_held and new.state <> 'PENDING' then
        insert into {schema}.line_changes (line, gates) values (new.serial, new.gates);
        return null;
    end if;
    insert into {schema}.line_changes (line, at)
    select changed.line, changed.at
    from (
        values (new.serial, case when new.state = 'PENDING' then new.serial_at end),
            (case when new.serial is distinct from old.serial then old.serial end, null)
    ) as changed (line, at)
    where changed.line is not null and (changed.at is not null or not starts_with(changed.line, 'limit:'));
    return null;
end
$$
