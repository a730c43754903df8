-- Note the lines of the serial tasks that were sent before. The recursion reads one index entry for each line.
with recursive line (serial) as (
    (select serial from {schema}.tasks where serial is not null and state in ('PENDING', 'CLAIMED', 'RUNNING') order by serial limit 1)
    union all
    select next_line.serial
    from line
    cross join lateral (
        select t.serial from {schema}.tasks t
        where t.serial > line.serial and t.state in ('PENDING', 'CLAIMED', 'RUNNING') order by t.serial limit 1
    ) next_line
)
insert into {schema}.line_changes (line) select line.serial from line
