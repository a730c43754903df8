-- Cancel the workflows that a task or its children have started: RUNNING | PAUSED -> CANCELLING. The worker that advances these workflows
-- cancels their nodes. If a node's task continues from the steps of an earlier task, it also owns the children and workflows of that task
-- (see task/cancel_children). A transition of a workflow locks the workflow's row before it locks tasks. So no task is locked here before
-- the workflows. If a claim_id is given, the code of the task has raised Cancel. This requires the task's current claim_id, and locks the
-- task after the workflows, so that a lost lease cancels nothing. Return the cancelled workflows.
with recursive {fragment/owners_of_children}, family (id) as (
    select o.id from owner o
    union
    select t.id from family f join {schema}.all_tasks t on t.parent_id = f.id
), held as materialized (
    select w.id from {schema}.workflows w
    where w.parent_task_id = any(array(select f.id from family f)) and w.state in ('RUNNING', 'PAUSED')
    order by w.id
    for no key update
), fenced as materialized (
    select t.id from {schema}.tasks t
    where t.id = %(id)s and t.claim_id = %(claim_id)s::uuid and t.state = 'RUNNING' and exists (select from held)
    for no key update
), cancelled as (
    update {schema}.workflows w
    set state = 'CANCELLING', cancel_requested_at = statement_timestamp()
    from held h
    where w.id = h.id and w.state in ('RUNNING', 'PAUSED') and (%(claim_id)s::uuid is null or exists (select from fenced))
    returning w.id
), happened as (
    insert into {schema}.outbox (workflow_id, node) select c.id, null::integer from cancelled c
)
select
    array(select c.id from cancelled c) as cancelled,
    case when exists (select from cancelled) and (select pg_notification_queue_usage()) < 0.5 then pg_notify(%(channel)s, 'w') end
