-- Whether only workers whose code meets these needs can run the task. Every worker of this version meets the need "limits".
create function {schema}.is_marked(needs json) returns boolean language sql immutable as $$
    select needs is not null and needs::text <> '{{"limits": true}}'
$$
