-- Count the workflows that have not ended, by state. Counting stops at `most` workflows. workflows_live serves the statement.
select w.state, count(*) as workflows
from (
    select l.state from {schema}.workflows l
    where l.state in ('RUNNING', 'PAUSED', 'CANCELLING')
    order by l.id
    limit %(most)s
) w
group by w.state
order by w.state
