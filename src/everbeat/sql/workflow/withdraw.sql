-- What a pause or a cancel takes back of locked workflows. Paused: tasks that have not begun are CANCELLED, and their nodes READY again; one
-- that has begun an attempt, recorded a step, or been sent a signal, goes on. Cancelled: nodes that were not enqueued are SKIPPED, tasks
-- that wait are CANCELLED, those that run are asked, and so is what these tasks have sent. Child workflows share it: they stand in the
-- outbox, and so does a workflow of which somebody was asked, who may have sent one more child meanwhile.
-- The row of a child is never waited for: its holder may be waiting for a child of one of these. Instead, the parent is looked at again.
-- Answers the parents of which that is so.
with recursive node as materialized (
    select n.workflow_id, n.number, n.kind, n.state, n.task_id, w.state as doing
    from {schema}.workflows w
    join {schema}.nodes n on n.workflow_id = w.id and n.state in ('PENDING', 'READY', 'ENQUEUED')
    where w.id = any(%(ids)s::text::uuid[]) and w.state in ('PAUSED', 'CANCELLING')
), family (id, workflow_id) as (
    select t.id, n.workflow_id
    from {schema}.workflows w
    join {schema}.nodes n on n.workflow_id = w.id and n.kind = 'task' and n.state in ('ENQUEUED', 'CANCELLED')
    join {schema}.tasks t on t.parent_id = n.task_id
    where w.id = any(%(ids)s::text::uuid[]) and w.state = 'CANCELLING'
    union
    select t.id, f.workflow_id from family f join {schema}.tasks t on t.parent_id = f.id
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
