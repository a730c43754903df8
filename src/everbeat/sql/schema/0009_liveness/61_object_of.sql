-- A stored JSON document as an object, or null if it is not an object or cannot be read. A cast to jsonb raises an error for texts that
-- json accepts (NUL, half of a surrogate pair, huge numbers). Such an error would end the whole statement.
create function {schema}.object_of(document json) returns jsonb language plpgsql stable as $$
begin
    return case when json_typeof(document) = 'object' then document::jsonb end;
exception when data_exception or program_limit_exceeded then
    return null;
end
$$
