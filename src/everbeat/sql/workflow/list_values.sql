-- Return the stored results and errors of nodes. A child that completed without its output also has an error. For a map, also return the
-- results and errors of its members, with their positions. The node -1 is the workflow's own input.
with asked as materialized (
    select distinct a.workflow_id, a.number
    from unnest(%(ids)s::text::uuid[], %(numbers)s::text::integer[]) as a (workflow_id, number)
), node as (
    select n.workflow_id, a.number as of, null::integer as place, n.state, n.kind, n.error, n.task_id
    from asked a join {schema}.nodes n on n.workflow_id = a.workflow_id and n.number = a.number
    union all
    select m.workflow_id, a.number, m.number - n.first_member, m.state, m.kind, m.error, m.task_id
    from asked a
    join {schema}.nodes n on n.workflow_id = a.workflow_id and n.number = a.number and n.kind = 'map'
    join {schema}.nodes m on m.workflow_id = n.workflow_id and m.number >= n.first_member and m.number < n.first_member::bigint + n.members
)
select
    n.workflow_id, n.of, n.place, n.state, coalesce(t.result, m.result, w.result)::text as result,
    coalesce(n.error, t.error, m.error, case when w.result is null then w.error end)::text as error, n.kind = 'map' as is_map
from node n
left join {schema}.tasks t on n.kind = 'task' and t.id = n.task_id
left join lateral (
    select h.result, h.error from {schema}.history h where t.id is null and n.kind = 'task' and h.id = n.task_id offset 0
) m on true
left join {schema}.workflows w on n.kind = 'workflow' and w.id = n.task_id
union all
select w.id, -1, null, 'COMPLETED', w.input::text, null, false
from asked a join {schema}.workflows w on w.id = a.workflow_id where a.number = -1
