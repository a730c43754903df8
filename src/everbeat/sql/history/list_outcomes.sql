-- Return the state, result and error of these tasks and workflows, as task/list_outcomes, also of tasks in `history`. One snapshot shows a task
-- that is moved at this moment exactly once.
select t.id, t.name, t.state, t.result::text, t.error::text, {fragment/missing_result} as missing
from {schema}.all_tasks t
where t.id = any(%(ids)s::uuid[])
union all
select
    w.id, w.name, case when w.state in ('COMPLETED', 'FAILED', 'CANCELLED') then w.state else 'RUNNING' end, w.result::text, w.error::text,
    null
from {schema}.workflows w
where w.id = any(%(ids)s::uuid[])
