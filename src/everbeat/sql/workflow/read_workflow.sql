-- Return the rows of workflows, with the number of their nodes in each state.
select
    w.id, w.name, w.key, w.state, w.on_error, w.node_count, w.output, w.parent_id, w.parent_node, w.parent_task_id, w.sent_at, w.paused_at, w.cancel_requested_at,
    w.ended_at, w.result::text as result, w.error::text as error, o.name as output_name,
    (
        select json_object_agg(c.state, c.count)::text
        from (select n.state, count(*) as count from {schema}.nodes n where n.workflow_id = w.id group by n.state) c
    ) as counts,
    w.labels::text as labels
from unnest(%(ids)s::text::uuid[]) as a (id)
join {schema}.workflows w on w.id = a.id
left join {schema}.nodes o on o.workflow_id = w.id and o.number = w.output
