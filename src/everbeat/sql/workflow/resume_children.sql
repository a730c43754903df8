-- Resume the children that were paused with their locked, running workflows: PAUSED -> RUNNING. As in workflow/withdraw_tasks, the
-- statement never waits for the row of a child; instead, the parent is checked again. Return the parents of children whose rows another
-- session has locked.
with child as materialized (
    select w.id, n.workflow_id
    from {schema}.nodes n
    join {schema}.workflows w on w.id = n.task_id and w.state = 'PAUSED' and w.is_held
    where n.workflow_id = any(%(ids)s::text::uuid[]) and n.kind = 'workflow' and n.state = 'ENQUEUED'
), free as materialized (
    select w.id from {schema}.workflows w where w.id in (select c.id from child c) order by w.id for no key update of w skip locked
), freed as (
    update {schema}.workflows w
    set state = 'RUNNING', paused_at = null, is_held = false
    from free f
    where w.id = f.id and w.state = 'PAUSED' and w.is_held
    returning w.id
), waits as materialized (
    select distinct c.workflow_id from child c where not exists (select from free f where f.id = c.id)
), happened as (
    insert into {schema}.outbox (workflow_id, node)
    select f.id, null::integer from freed f
    union all
    select w.workflow_id, null::integer from waits w
)
select array(select w.workflow_id from waits w) as waits
