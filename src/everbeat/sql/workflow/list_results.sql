-- Return the stored results and errors of these nodes. A child that completed without its output also has an error. The node -1 is the
-- workflow's own input.
with asked as materialized (
    select a.workflow_id, a.number
    from unnest(%(ids)s::text::uuid[], %(numbers)s::text::integer[]) as a (workflow_id, number)
)
select
    n.workflow_id, n.number, coalesce(t.result, w.result)::text as result,
    coalesce(n.error, t.error, case when w.result is null then w.error end)::text as error
from asked a
join {schema}.nodes n on n.workflow_id = a.workflow_id and n.number = a.number
left join {schema}.tasks t on n.kind = 'task' and t.id = n.task_id
left join {schema}.workflows w on n.kind = 'workflow' and w.id = n.task_id
union all
select w.id, -1, w.input::text, null
from asked a join {schema}.workflows w on w.id = a.workflow_id where a.number = -1
