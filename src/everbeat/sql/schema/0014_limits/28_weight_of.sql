-- The weight of a key: from 1 to 1000, and 1 if no usable weight is set.
create function {schema}.weight_of(weights json, key text) returns integer language sql immutable as $$
    select case when found.weight ~ '^[0-9]{{1,4}}$' then least(1000, greatest(1, found.weight::integer)) else 1 end
    from (select case when json_typeof(weights) = 'object' then weights ->> key end as weight) found
$$
