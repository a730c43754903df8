-- Start a workflow: nothing -> RUNNING. The workflow's id makes the call idempotent; there is at most one live workflow per name and key.
-- Nodes without dependencies are READY. A child's input is known when the child starts, and its end is reported to its parent. A
-- workflow inherits the labels and the carrier of the task that starts it, or of its parent. The statement
-- itself notifies only as part of a larger transaction (`joined`). Otherwise task/announce_hints follows the commit.
with asked as (
    select %(id)s::uuid as id
), inserted as (
    insert into {schema}.workflows (id, name, key, on_error, success, output, node_count, input, parent_id, parent_node, largest_arguments, parent_task_id, labels, context)
    select
        a.id, %(name)s, %(key)s::text, %(on_error)s, %(success)s::text::json, %(output)s::integer, %(node_count)s::integer,
        %(input)s::text::json, %(parent_id)s::uuid, %(parent_node)s::integer, %(largest)s::integer, %(parent_task_id)s::uuid,
        coalesce(above.labels || %(labels)s::text::jsonb, above.labels, %(labels)s::text::jsonb), coalesce(%(context)s::text::json, above.context)
    from asked a
    cross join lateral (
        select coalesce(t.labels, p.labels) as labels, coalesce(t.context, p.context) as context
        from asked
        left join {schema}.tasks t on t.id = %(parent_task_id)s::uuid
        left join {schema}.workflows p on p.id = %(parent_id)s::uuid
    ) above
    on conflict do nothing
    returning id
), kind as (
    select k.*
    from rows from (
        unnest(%(tasks)s::text[], %(queues)s::text[], %(priorities)s::smallint[]), json_array_elements(%(options)s::text::json)
    ) with ordinality as k (task, queue, priority, options, kind)
), node as (
    insert into {schema}.nodes (
        workflow_id, number, name, kind, state, member_of, first_member, members, quorum, task, queue, priority, options, args, template,
        items, graph, enqueued_at
    )
    select
        i.id, n.number - 1, n.name, n.kind, n.state, n.member_of, n.first_member, n.members, n.quorum, k.task, k.queue, k.priority,
        nullif(k.options::text, 'null')::json, nullif(n.args::text, 'null')::json, nullif(n.template::text, 'null')::json,
        nullif(n.items::text, 'null')::json, nullif(n.graph::text, 'null')::json,
        case when n.state = 'ENQUEUED' then statement_timestamp() end
    from inserted i
    cross join rows from (
        unnest(
            %(node_names)s::text[], %(node_kinds)s::text[], %(states)s::text[], %(members_of)s::text::integer[],
            %(first_members)s::text::integer[], %(members)s::text::integer[], %(quorums)s::text::integer[], %(specs)s::text::integer[]
        ),
        json_array_elements(%(args)s::text::json), json_array_elements(%(templates)s::text::json),
        json_array_elements(%(items)s::text::json), json_array_elements(%(graphs)s::text::json)
    ) with ordinality as n (
        name, kind, state, member_of, first_member, members, quorum, spec, args, template, items, graph, number
    )
    left join kind k on k.kind = n.spec
    returning workflow_id, number, members
), edge as (
    insert into {schema}.edges (workflow_id, parent, child, number, joins, tolerates, path, expects, if_failed)
    select i.id, e.parent, e.child, e.number, e.joins, e.tolerates, array(select json_array_elements_text(e.path)), e.expects, e.if_failed
    from inserted i
    cross join rows from (
        unnest(
            %(parents)s::text::integer[], %(children)s::text::integer[], %(numbers)s::text::smallint[], %(joins)s::text::boolean[],
            %(tolerates)s::text::boolean[], %(expects)s::text::boolean[],
            %(if_failed)s::text::boolean[]
        ),
        json_array_elements(%(paths)s::text::json)
    ) as e (parent, child, number, joins, tolerates, expects, if_failed, path)
), happened as (
    insert into {schema}.outbox (workflow_id, node)
    select i.id, -1 from inserted i union all select n.workflow_id, n.number from node n where n.members = 0
)
select
    coalesce(
        (select i.id from inserted i),
        (select w.id from {schema}.workflows w where w.id = %(id)s),
        (
            select w.id from {schema}.workflows w
            where w.name = %(name)s and w.key = %(key)s and w.state in ('RUNNING', 'PAUSED', 'CANCELLING')
        )
    ) as id,
    exists (select from inserted) as inserted,
    case when exists (select from inserted) and %(joined)s and %(parent_id)s::uuid is null and (select pg_notification_queue_usage()) < 0.5
        then pg_notify(%(channel)s, 'w') end
