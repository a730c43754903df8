-- Whether lines or gates have to be updated by apply_line_changes. Lines become due only for workers that can run their first task.
exists (
        select from {schema}.line_changes c
        where c.xid >= (select f.last_value::text::xid8 from {schema}.line_changes_floor f) and c.freed
    ) or exists (
        select from {schema}.line_changes c
        where c.xid >= (select f.last_value::text::xid8 from {schema}.line_changes_floor f) and not c.freed
    ) or exists (
        select from (
            select unnest(%(names)s::text[]) as reader
            union all
            select m.needs_id::text from json_to_recordset(%(marked)s::json) as m (needs_id uuid)
        ) r
        cross join lateral (
            select from {schema}.lines l where l.state = 'W' and l.reader = r.reader and l.at <= statement_timestamp() limit 1
        ) due
    )
    or exists (select from {schema}.gates g where g.opens_at <= statement_timestamp())
    or exists (select from {schema}.limits m where m.until <= statement_timestamp())
    or exists (select from {schema}.limits m where m.has_old_lines)
    or exists (
        select from {schema}.limits m
        where m.has_old_gates
          and (select min(g.version) from {schema}.gates g where g.limit_name = m.name) < m.version
    )
    -- After a restore into another cluster, the floor is above the transaction ids of new changes.
    or pg_snapshot_xmin(pg_current_snapshot()) < (select f.last_value::text::xid8 from {schema}.line_changes_floor f)
