-- Return the states of nodes and the stored size of their results, without reading the results. For a map, also return the states and sizes
-- of its members, with their positions. `ended_at` decides which of several nodes completed first. The node -1 is the workflow's own input.
with asked as materialized (
    select distinct a.workflow_id, a.number
    from unnest(%(ids)s::text::uuid[], %(numbers)s::text::integer[]) as a (workflow_id, number)
), node as (
    select n.workflow_id, n.number, n.state, n.kind, n.task_id, n.error, n.ended_at, a.number as of, null::integer as place
    from asked a join {schema}.nodes n on n.workflow_id = a.workflow_id and n.number = a.number
    union all
    select m.workflow_id, m.number, m.state, m.kind, m.task_id, m.error, m.ended_at, a.number, m.number - n.first_member
    from asked a
    join {schema}.nodes n on n.workflow_id = a.workflow_id and n.number = a.number and n.kind = 'map'
    join {schema}.nodes m on m.workflow_id = n.workflow_id and m.number >= n.first_member and m.number < n.first_member::bigint + n.members
)
select
    n.workflow_id, n.of, n.number, n.place, n.state, n.kind = 'map' as is_map,
    coalesce(pg_column_size(t.result), pg_column_size(w.result), 0)
        + coalesce(pg_column_size(n.error), pg_column_size(t.error), pg_column_size(w.error), 0) as stored,
    coalesce(t.completed_at, n.ended_at) as ended_at
from node n
left join {schema}.tasks t on n.kind = 'task' and t.id = n.task_id
left join {schema}.workflows w on n.kind = 'workflow' and w.id = n.task_id
union all
select w.id, -1, -1, null, 'COMPLETED', false, coalesce(pg_column_size(w.input), 0), null
from asked a join {schema}.workflows w on w.id = a.workflow_id where a.number = -1
