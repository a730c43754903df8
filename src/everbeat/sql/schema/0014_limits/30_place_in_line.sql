-- Return the needs, the line and the place of a task with gates. Its place in a line that is not strict is the time when it is due. Code that
-- does not know limits must leave the task alone, so its needs contain the key "limits" (see docs/internals.md, "Migrations").
create function {schema}.place_in_line(task {schema}.tasks, out needs json, out needs_id uuid, out serial text, out serial_at timestamptz)
language plpgsql stable as $$
begin
    needs := task.needs;
    needs_id := task.needs_id;
    if needs is null then
        needs := '{{"limits": true}}';
        needs_id := {schema}.mark_of(task.name, needs);
    elsif position('"limits"' in needs::text) = 0 and position(E'\\u0000' in needs::text) = 0 and {schema}.is_readable(needs) then
        needs := json_build_object('arguments', needs -> 'arguments', 'limits', true);
        needs_id := {schema}.mark_of(task.name, needs);
    end if;
    if task.serial is null or starts_with(task.serial, 'limit:') then
        serial := {schema}.line_of(task.queue, task.priority, task.name, task.gates, task.costs, needs_id, task.suspect);
        serial_at := task.enqueued_at;
    else
        serial := task.serial;
        serial_at := task.serial_at;
    end if;
end
$$
