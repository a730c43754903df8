-- Whether the held task `h` has a mark with a requirement that this version does not know: `later.is_marked`.
cross join lateral (
    select exists (
        select from json_object_keys(case when json_typeof(h.needs) = 'object' then h.needs end) k (name) where k.name not in ('arguments', 'limits')
    ) as is_marked
) later
