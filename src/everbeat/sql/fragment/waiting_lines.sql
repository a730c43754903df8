-- Lines of limits that are in use, also those whose first tasks are noted in `line_changes` only, because no worker has applied the changes
-- yet. Of the lines and of these changes, at most `most_lines` are read.
line as materialized (
    (select l.line, l.name, l.gates, l.costs from {schema}.lines l where l.gates is not null and l.state <> 'I' limit %(most_lines)s)
    union all
    select c.line, head.name, head.gates, head.costs
    from (select distinct n.line from (select x.line from {schema}.line_changes x where x.line is not null limit %(most_lines)s) n) c
    cross join lateral (
        select t.name, t.gates, t.costs from {schema}.tasks t
        where t.serial = c.line and t.state = 'PENDING' order by t.serial_at, t.id limit 1
    ) head
    where head.gates is not null
      and not exists (select from {schema}.lines l where l.line = c.line and l.gates is not null and l.state <> 'I')
)
