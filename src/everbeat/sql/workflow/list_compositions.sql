-- Return how the arguments of these nodes are composed. A member of a map over a result has its map's graph.
select
    n.workflow_id, n.number, n.kind, n.name, n.args::text, n.template::text, n.items::text,
    case when n.kind = 'workflow' then coalesce(n.graph, (
        select m.graph from {schema}.nodes m where m.workflow_id = n.workflow_id and m.number = n.member_of
    ))::text end as graph
from unnest(%(ids)s::text::uuid[], %(numbers)s::text::integer[]) as a (workflow_id, number)
join {schema}.nodes n on n.workflow_id = a.workflow_id and n.number = a.number
where n.template is not null or n.items is not null or n.kind = 'workflow'
