-- Return the state, result and error of these tasks and workflows. Every workflow state that is not terminal is returned as RUNNING.
-- Unknown ids have no row.
select t.id, t.name, t.state, t.result::text, t.error::text
from {schema}.tasks t
where t.id = any(%(ids)s::uuid[])
union all
select
    w.id, w.name, case when w.state in ('COMPLETED', 'FAILED', 'CANCELLED') then w.state else 'RUNNING' end, w.result::text, w.error::text
from {schema}.workflows w
where w.id = any(%(ids)s::uuid[])
