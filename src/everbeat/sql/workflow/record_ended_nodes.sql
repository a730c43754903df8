-- Process the events of locked workflows in order. A node whose task or child has ended takes over its end state, and the edges of ended
-- nodes become met or unmet. If a task's result or error is missing, the node gets an error instead. No row from which an update takes its
-- values contains a result: PostgreSQL reads such rows in full, and results can be large. Return nodes that might have a transition now,
-- and READY nodes of running workflows, up to the number that one transition takes. Also return nodes that failed or were refused, and the
-- workflows to check as a whole.
with taken as materialized (
    delete from {schema}.outbox o
    where o.id = any(array(
        select h.id
        from unnest(%(ids)s::text::uuid[]) as w (id)
        cross join lateral (
            select o.id, row_number() over (order by o.id) as turn
            from {schema}.outbox o where o.workflow_id = w.id order by o.id limit %(limit)s
        ) h
        order by h.turn
        limit %(limit)s
    ))
    returning o.workflow_id, o.node
), whole as materialized (
    select distinct t.workflow_id from taken t where t.node is null
), concerned as materialized (
    select distinct t.workflow_id, t.node as number from taken t where t.node >= 0
    union
    select n.workflow_id, n.number from whole w join {schema}.nodes n on n.workflow_id = w.workflow_id and n.state <> 'PENDING'
), known as materialized (
    select
        n.workflow_id, n.number, n.kind, n.state, n.member_of,
        case when n.state <> 'ENQUEUED' then null
             when n.kind = 'task' and t.id is null then 'FAILED'
             when t.state = 'COMPLETED' and t.result is null then 'FAILED'
             when t.state in ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED') then t.state
             when n.kind = 'workflow' and w.id is null then 'FAILED'
             when w.state in ('COMPLETED', 'FAILED', 'CANCELLED') then w.state
        end as came_to,
        case when n.kind = 'task' and t.id is null
             then json_build_object('code', 'RESULT_NOT_AVAILABLE', 'message', 'the task of this node is gone')
             when t.state = 'COMPLETED' and t.result is null
             then json_build_object('code', 'RESULT_NOT_AVAILABLE', 'message', 'the task completed, but its result is missing')
             when t.state = 'FAILED' and t.error is null
             then json_build_object('code', 'WORKER_CRASHED', 'message', 'the task failed, but its error is missing')
             when t.state = 'CANCELLED' and t.error is null
             then json_build_object('code', 'TASK_CANCELLED', 'message', 'the task was cancelled')
             when t.state = 'EXPIRED' and t.error is null
             then json_build_object('code', 'TASK_EXPIRED', 'message', 'the task did not start in time')
             when n.kind = 'workflow' and w.id is null
             then json_build_object('code', 'RESULT_NOT_AVAILABLE', 'message', 'the workflow of this node is gone')
             when w.state in ('FAILED', 'CANCELLED')
             then json_build_object(
                 'code', 'SUBWORKFLOW_' || w.state, 'message', 'the workflow ' || w.name || ' of this node ended ' || w.state || coalesce(': ' || (replace(w.error::text, E'\\u0000', E'\\ufffd')::json ->> 'message'), ''),
                 'data', json_build_object('workflow_id', w.id, 'name', w.name, 'state', w.state, 'error', w.error))
        end as missing,
        n.task_id
    from concerned c
    join {schema}.nodes n on n.workflow_id = c.workflow_id and n.number = c.number
    left join {schema}.tasks t on n.kind = 'task' and t.id = n.task_id
    left join {schema}.workflows w on n.kind = 'workflow' and w.id = n.task_id
), ended as (
    update {schema}.nodes n
    set state = k.came_to, ended_at = statement_timestamp(), error = k.missing
    from known k
    where n.workflow_id = k.workflow_id and n.number = k.number and k.came_to is not null and k.kind <> 'map'
    returning n.workflow_id, n.number, n.state, n.member_of
), closing as materialized (
    select k.workflow_id, k.number, coalesce(case when k.kind <> 'map' then k.came_to end, k.state) as state, k.kind, k.task_id
    from known k
), closed as (
    update {schema}.edges e
    set state = case
            when (c.state = 'COMPLETED' or e.tolerates) and (e.expects is null or (
                select (replace(coalesce(t.result, w.result)::text, E'\\u0000', E'\\u0001')::json #> e.path)::text = e.expects::text
                from (select) self
                left join {schema}.tasks t on c.kind = 'task' and t.id = c.task_id
                left join {schema}.workflows w on c.kind = 'workflow' and w.id = c.task_id
            )) then 'MET'
            else 'UNMET'
        end
    from closing c
    where e.workflow_id = c.workflow_id and e.parent = c.number and e.state = 'OPEN'
      and c.state in ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED', 'SKIPPED')
    returning e.workflow_id, e.child
), marked as materialized (
    select distinct t.workflow_id
    from taken t join {schema}.workflows w on w.id = t.workflow_id and w.state = 'RUNNING'
    where t.node = -1 or t.node is null
), ready as materialized (
    select n.* from marked m
    cross join lateral (
        select n.workflow_id, n.number, n.kind, n.template is not null or n.items is not null or n.kind = 'workflow' as composed
        from {schema}.nodes n where n.workflow_id = m.workflow_id and n.state = 'READY' order by n.number limit %(limit)s
    ) n
    limit %(limit)s
), again as (
    insert into {schema}.outbox (workflow_id, node)
    select m.workflow_id, -1 from marked m where (select count(*) from ready) = %(limit)s
)
select 'look' as what, c.workflow_id, c.child as number, null as kind, null::boolean as composed from closed c
union
select 'look', e.workflow_id, e.member_of, null, null from ended e where e.member_of is not null
union
select 'look', n.workflow_id, n.member_of, null, null from concerned c
join {schema}.nodes n on n.workflow_id = c.workflow_id and n.number = c.number and n.member_of is not null
union
select 'look', n.workflow_id, n.number, null, null from whole w join {schema}.nodes n on n.workflow_id = w.workflow_id and n.state = 'PENDING'
union
select 'look', k.workflow_id, k.number, null, null from known k where k.kind = 'map' and k.state = 'ENQUEUED'
union
select 'ready', r.workflow_id, r.number, r.kind, r.composed from ready r
union
select 'failed', e.workflow_id, e.number, null, null from ended e where e.state <> 'COMPLETED'
union
select 'failed', t.workflow_id, t.node, null, null
from taken t join {schema}.nodes n on n.workflow_id = t.workflow_id and n.number = t.node
where t.node >= 0 and n.state = 'FAILED' and n.task_id is null and (n.kind <> 'map' or n.members is null)
union all
select 'whole', w.workflow_id, 0, null, null from whole w
