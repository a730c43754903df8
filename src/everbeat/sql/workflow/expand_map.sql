-- Create the members of a map with known items, as READY. The map ends when its members have ended. If the map has a graph, each member is
-- a workflow and finds the graph at its map.
with map as (
    update {schema}.nodes n
    set state = 'ENQUEUED', enqueued_at = statement_timestamp(), iteration = n.iteration + 1, first_member = w.node_count,
        members = json_array_length(%(args)s::text::json)
    from {schema}.workflows w
    where n.workflow_id = %(id)s and n.number = %(number)s and n.state in ('PENDING', 'READY') and n.kind = 'map' and n.members is null
      and w.id = n.workflow_id
    returning n.workflow_id, n.number, n.name, n.first_member, n.members, n.task, n.queue, n.priority, n.options,
        n.graph is not null as is_of_workflows
), member as (
    insert into {schema}.nodes (workflow_id, number, name, kind, state, member_of, task, queue, priority, options, args)
    select
        m.workflow_id, m.first_member + a.place - 1, m.name || '[' || (a.place - 1) || ']',
        case when m.is_of_workflows then 'workflow' else 'task' end, 'READY', m.number, m.task, m.queue, m.priority, m.options, a.args
    from map m cross join json_array_elements(%(args)s::text::json) with ordinality as a (args, place)
), counted as (
    update {schema}.workflows w set node_count = least(m.first_member::bigint + m.members, 2147483647)::integer from map m where w.id = m.workflow_id
), happened as (
    insert into {schema}.outbox (workflow_id, node)
    select m.workflow_id, -1 from map m where m.members > 0
    union all
    select m.workflow_id, m.number from map m where m.members = 0
)
select count(*) as expanded from map
