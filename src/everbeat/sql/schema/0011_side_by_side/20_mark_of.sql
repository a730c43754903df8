-- The id of what a task needs: a hash of its name and of `needs`. Rows that one id names need the same. A row in which it does not fit the
-- other two columns was not marked by everbeat.
create function {schema}.mark_of(name text, needs json) returns uuid language sql immutable as $$
    select encode(substr(sha256(convert_to(json_build_array(name, needs)::text, 'UTF8')), 17), 'hex')::uuid
$$
