-- Note the gates of the limits in `changed` at which lines wait, so that the waiting tasks are judged by the new numbers.
woken as (
    insert into {schema}.line_changes (gates)
    select array[g.gate] from changed c join {schema}.gates g on g.limit_name = c.name
    where exists (select from {schema}.lines l where l.state = 'B' and l.blocked = g.gate)
    returning 1
)
