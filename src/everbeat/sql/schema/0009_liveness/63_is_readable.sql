-- Whether clients can read a stored JSON document. NUL is readable. Half of a surrogate pair, a number beyond the range of a double, and
-- 500 levels of nesting are not.
create function {schema}.is_readable(document json) returns boolean language plpgsql stable as $$
declare
    readable jsonb;
begin
    readable := replace(document::text, E'\\u0000', E'\\u0001')::jsonb;
    return not jsonb_path_exists(readable, '$.** ? (@.type() == "number" && (@ > 1e308 || @ < -1e308))')
        and not jsonb_path_exists(readable, '$.**{{500 to last}}');
exception when data_exception or program_limit_exceeded then
    return false;
end
$$
