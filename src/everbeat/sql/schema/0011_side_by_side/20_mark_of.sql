-- The id of a task's requirements: a hash of its name and of `needs`. Rows with the same id have the same requirements. A row whose id does
-- not match the other two columns was not marked by everbeat.
create function {schema}.mark_of(name text, needs json) returns uuid language sql immutable as $$
    select encode(substr(sha256(convert_to(json_build_array(name, needs)::text, 'UTF8')), 17), 'hex')::uuid
$$
