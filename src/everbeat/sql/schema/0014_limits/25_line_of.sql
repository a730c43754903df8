-- The line of a task that has gates but no serial key. The prefix distinguishes such a line from a strict one.
create function {schema}.line_of(
    queue text, priority smallint, name text, gates text[], costs integer[], needs_id uuid, suspect boolean
) returns text language sql immutable as $$
    select 'limit:' || md5(json_build_array(queue, priority, name, gates, costs, needs_id, suspect)::text)
$$
