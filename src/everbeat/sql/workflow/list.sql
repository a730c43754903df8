-- The latest workflows, by name, state or key.
select
    w.id, w.name, w.key, w.state, w.on_error, w.node_count, w.output, w.parent_id, w.parent_node, w.sent_at, w.paused_at, w.cancel_requested_at,
    w.ended_at, null::text as result, w.error::text as error, null::text as output_name,
    (
        select json_object_agg(c.state, c.count)::text
        from (select n.state, count(*) as count from {schema}.nodes n where n.workflow_id = w.id group by n.state) c
    ) as counts
from {schema}.workflows w
where (%(name)s::text is null or w.name = %(name)s::text) and (%(state)s::text is null or w.state = %(state)s::text)
  and (%(key)s::text is null or w.key = %(key)s::text) and (%(roots)s::boolean is not true or w.parent_id is null)
order by w.id desc
limit %(limit)s
