-- Whether lines or gates have to be updated by apply_line_changes.
exists (
        select from {schema}.line_changes c
        where c.xid >= (select f.last_value::text::xid8 from {schema}.line_changes_floor f) and c.freed
    ) or exists (
        select from {schema}.line_changes c
        where c.xid >= (select f.last_value::text::xid8 from {schema}.line_changes_floor f) and not c.freed
    ) or exists (select from {schema}.lines l where l.state = 'W' and l.at <= statement_timestamp())
    or exists (select from {schema}.gates g where g.opens_at <= statement_timestamp())
