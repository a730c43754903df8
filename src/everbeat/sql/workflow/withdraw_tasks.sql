-- Withdraw tasks of locked workflows after a pause or a cancel. After a pause, tasks that have not begun are CANCELLED, and their nodes are
-- READY again. A task that has begun an attempt, recorded a step, or received a signal continues. After a cancel, nodes that were not
-- enqueued are SKIPPED, and waiting tasks are CANCELLED. Running tasks and the children of all these tasks get a cancel request. Child
-- workflows are treated the same way, through entries in the outbox. A workflow with a cancel request is treated the same way, because its
-- task might have sent one more child in the meantime. Workflows that these tasks have started are cancelled like child workflows. The
-- statement never waits for a child's row, because the session that has locked it might itself be waiting for a child of these workflows.
-- Instead, the parent is checked again, so the statement returns such parents. The task of a node that runs again also owns the children
-- and workflows of its earlier task (see task/cancel_children).
with recursive node as materialized (
    select n.workflow_id, n.number, n.kind, n.state, n.task_id, w.state as doing
    from {schema}.workflows w
    join {schema}.nodes n on n.workflow_id = w.id and n.state in ('PENDING', 'READY', 'ENQUEUED')
    where w.id = any(%(ids)s::text::uuid[]) and w.state in ('PAUSED', 'CANCELLING')
), owned as materialized (
    select n.task_id as id, n.workflow_id, n.number, n.iteration
    from {schema}.workflows w
    join {schema}.nodes n on n.workflow_id = w.id and n.kind = 'task' and n.state in ('ENQUEUED', 'CANCELLED')
    where w.id = any(%(ids)s::text::uuid[]) and w.state = 'CANCELLING'
), owner (id, workflow_id) as materialized (
    select o.id, o.workflow_id from owned o
    union
    select p.id, o.workflow_id
    from owned o
    join {schema}.steps s on s.task_id = o.id and s.kind = 'child'
    left join {schema}.all_tasks c on c.id = (s.result #>> '{{}}')::uuid
    left join {schema}.workflows f on f.id = (s.result #>> '{{}}')::uuid
    left join {schema}.tasks g on g.batch_id = (s.result #>> '{{}}')::uuid and g.state in ('PENDING', 'CLAIMED', 'RUNNING')
    join {schema}.tasks p on p.id = coalesce(c.parent_id, f.parent_task_id, g.parent_id) and p.workflow_id = o.workflow_id and p.node = o.number
    where o.iteration > 1
), family (id, workflow_id) as (
    select t.id, o.workflow_id from owner o join {schema}.all_tasks t on t.parent_id = o.id
    union
    select t.id, f.workflow_id from family f join {schema}.all_tasks t on t.parent_id = f.id
), concerned (id, workflow_id, number, doing) as materialized (
    select n.task_id, n.workflow_id, n.number, n.doing from node n where n.kind = 'task' and n.state = 'ENQUEUED'
    union all
    select f.id, f.workflow_id, null, 'CANCELLING' from family f
), held as materialized (
    select t.id, t.state, t.attempt, t.queue, t.serial, t.cancel_requested_at is not null as is_asked, c.workflow_id, c.number, c.doing
    from {schema}.tasks t
    join concerned c on c.id = t.id
    where t.state in ('PENDING', 'CLAIMED', 'RUNNING')
      and (
          c.doing = 'CANCELLING'
          or t.attempt = 0 and t.checkpoint is null and not exists (select from {schema}.steps s where s.task_id = t.id)
             and not exists (select from {schema}.signals s where s.target = t.id)
      )
    order by t.id
    for no key update of t
), ended as (
    update {schema}.tasks t
    set state = 'CANCELLED', cancelled_at = statement_timestamp(), cancel_requested_at = coalesce(t.cancel_requested_at, statement_timestamp()),
        claim_id = null, claim_call = null, next_retry_at = null,
        error = json_build_object(
            'code', case when h.number is null then 'TASK_CANCELLED' when h.doing = 'PAUSED' then 'WORKFLOW_PAUSED' else 'WORKFLOW_CANCELLED' end,
            'message', case
                when h.number is null then 'cancelled with its parent, whose workflow was cancelled'
                when h.doing = 'PAUSED' then 'its workflow was paused before it began'
                else 'its workflow was cancelled'
            end)
    from held h
    where t.id = h.id and h.state in ('PENDING', 'CLAIMED')
    returning t.id, h.workflow_id, h.number, h.doing, h.state as was, t.queue, t.serial
), asked as (
    update {schema}.tasks t
    set cancel_requested_at = coalesce(t.cancel_requested_at, statement_timestamp())
    from held h
    where t.id = h.id and h.state = 'RUNNING' and h.doing = 'CANCELLING'
    returning t.id, h.workflow_id, h.is_asked
), again as (
    update {schema}.nodes n
    set state = 'READY', task_id = null
    from ended e
    where e.doing = 'PAUSED' and n.workflow_id = e.workflow_id and n.number = e.number
), skipped as (
    update {schema}.nodes n
    set state = 'SKIPPED', ended_at = statement_timestamp(),
        error = json_build_object('code', 'WORKFLOW_CANCELLED', 'message', 'skipped: the workflow was cancelled')
    from node d
    where d.doing = 'CANCELLING' and d.state in ('PENDING', 'READY') and n.workflow_id = d.workflow_id and n.number = d.number
    returning n.workflow_id, n.number, n.member_of
), child as materialized (
    select n.task_id as id, n.workflow_id, n.doing
    from node n
    join {schema}.workflows w on w.id = n.task_id and w.state in ('RUNNING', 'PAUSED') and w.state <> n.doing
    where n.kind = 'workflow' and n.state = 'ENQUEUED'
    union
    select w.id, s.workflow_id, 'CANCELLING'
    from (
        select f.id, f.workflow_id from family f
        union
        select o.id, o.workflow_id from owner o
    ) s
    join {schema}.workflows w on w.parent_task_id = s.id and w.state in ('RUNNING', 'PAUSED')
), free as materialized (
    select w.id from {schema}.workflows w where w.id in (select c.id from child c) order by w.id for no key update of w skip locked
), follows as (
    update {schema}.workflows w
    set state = c.doing, is_held = c.doing = 'PAUSED', paused_at = case when c.doing = 'PAUSED' then statement_timestamp() else w.paused_at end,
        cancel_requested_at = case when c.doing = 'CANCELLING' then statement_timestamp() else w.cancel_requested_at end
    from child c
    join free f on f.id = c.id
    where w.id = c.id and w.state in ('RUNNING', 'PAUSED') and w.state <> c.doing
    returning w.id
), waits as materialized (
    select distinct c.workflow_id from child c where not exists (select from free f where f.id = c.id)
), happened as (
    insert into {schema}.outbox (workflow_id, node)
    select f.id, null::integer from follows f
    union all
    select w.workflow_id, null::integer from waits w
    union all
    select distinct s.workflow_id, s.member_of from skipped s where s.member_of is not null
    union all
    select distinct a.workflow_id, null::integer from asked a where not a.is_asked
), hint as materialized (
    select count(pg_notify(%(channel)s, payload)) filter (where (select pg_notification_queue_usage()) < 0.5) as hints from (
        select 'd:' || e.id as payload from ended e
        union all
        select 'l:' || e.id from ended e where e.was = 'CLAIMED'
        union all
        select 'c:' || a.id from asked a
        union
        select 't:' || left(e.queue, 1000) from ended e where e.serial is not null
    ) hints
)
select array(select w.workflow_id from waits w) as waits, (select hints from hint) as hints
