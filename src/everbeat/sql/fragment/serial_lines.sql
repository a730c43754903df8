-- The lines that have PENDING tasks. They are read in the same way as in fragment/lanes. The walk reads only the index. If it
-- needed rows too, the planner could sort all lines in each step. Read a limited number of lines: each key has one.
serial_line (serial) as (
    (select t.serial from {schema}.tasks t where t.state = 'PENDING' and t.serial is not null order by t.serial limit 1)
    union all
    select next_line.serial
    from serial_line l
    cross join lateral (
        select t.serial from {schema}.tasks t where t.state = 'PENDING' and t.serial is not null and t.serial > l.serial order by t.serial limit 1
    ) next_line
)
