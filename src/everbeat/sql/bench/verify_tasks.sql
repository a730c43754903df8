-- Count the tasks with a given name, and how many of them completed in one attempt with the right result. Also return the time from the
-- first start to the last completion.
select
    count(*) as sent,
    count(*) filter (
        where t.state = 'COMPLETED' and t.result::text = t.args->>'number'
          and (select count(*) from {schema}.attempts a where a.task_id = t.id and a.outcome = 'COMPLETED') = 1
          and (select count(*) from {schema}.attempts a where a.task_id = t.id) = 1
    ) as right_once,
    extract(epoch from max(t.completed_at) - min(t.started_at))::float8 as took_s
from {schema}.tasks t
where t.name = %(name)s
