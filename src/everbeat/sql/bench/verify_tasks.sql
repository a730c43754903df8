-- Count the tasks with a given name, and how many of them completed with the right result after their code ran once. Also return the time
-- from the first start to the last completion. A RELEASED attempt ran no code: a busy worker gives tasks back that would wait too long.
select
    count(*) as sent,
    count(*) filter (
        where t.state = 'COMPLETED' and t.result::text = t.args->>'number'
          and (select count(*) from {schema}.attempts a where a.task_id = t.id and a.outcome = 'COMPLETED') = 1
          and (select count(*) from {schema}.attempts a where a.task_id = t.id and a.outcome <> 'RELEASED') = 1
    ) as right_once,
    extract(epoch from max(t.completed_at) - min(t.started_at))::float8 as took_s
from {schema}.tasks t
where t.name = %(name)s
