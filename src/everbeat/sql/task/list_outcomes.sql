-- Return the state, result and error of these tasks and workflows. Every workflow state that is not terminal is returned as RUNNING.
-- Unknown ids, and those of tasks in `history`, have no row: see history/list_outcomes. `missing` says why a completed task has no result: its policy ignores results, or the result was removed.
select
    t.id, t.name, t.state, t.result::text, t.error::text,
    {fragment/missing_result} as missing
from {schema}.tasks t
where t.id = any(%(ids)s::uuid[])
union all
select
    w.id, w.name, case when w.state in ('COMPLETED', 'FAILED', 'CANCELLED') then w.state else 'RUNNING' end, w.result::text, w.error::text,
    null
from {schema}.workflows w
where w.id = any(%(ids)s::uuid[])
