-- How the arguments of these nodes are put together.
select n.workflow_id, n.number, n.kind, n.name, n.args::text, n.template::text, n.items::text, n.graph::text
from unnest(%(ids)s::text::uuid[], %(numbers)s::text::integer[]) as a (workflow_id, number)
join {schema}.nodes n on n.workflow_id = a.workflow_id and n.number = a.number
where n.template is not null or n.items is not null or n.graph is not null
