-- The lines of fragment/waiting_lines, with each of their gates and the number of their waiting tasks. Of each line, at most 1,001 are counted.
from line l
    cross join lateral (
        select count(*) as tasks
        from (select from {schema}.tasks t where t.serial = l.line and t.state = 'PENDING' limit 1001) counted
    ) n
    cross join lateral unnest(l.gates) as u (gate)
