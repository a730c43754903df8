-- Retry a workflow on behalf of an operator, together with its children that are retried. The id of the call makes the retry idempotent.
-- The nodes to restart were chosen before (plan_retry in domain.workflow.states), while the workflow was locked. Edges from these nodes to
-- waiting nodes are opened again. If the list of a map is computed again, the map's members are deleted, but their tasks are kept.
with root as (
    update {schema}.workflows w
    set state = 'RUNNING', ended_at = null, error = null, result = null, paused_at = null, is_held = false, cancel_requested_at = null,
        retry_call = %(call)s, largest_arguments = greatest(coalesce(w.largest_arguments, %(default)s), %(largest)s::integer)
    where w.id = %(id)s
    returning w.id
), child as (
    update {schema}.workflows w
    set state = 'RUNNING', ended_at = null, error = null, result = null, paused_at = null, cancel_requested_at = null,
        largest_arguments = greatest(coalesce(w.largest_arguments, %(default)s), %(largest)s::integer)
    where w.id = any(%(children)s::text::uuid[]) and w.id <> %(id)s and w.state in ('FAILED', 'CANCELLED')
    returning w.id
), asked as materialized (
    select a.*
    from unnest(
        %(workflows)s::text::uuid[], %(numbers)s::text::integer[], %(states)s::text[], %(emptied)s::text::boolean[]
    ) as a (workflow_id, number, state, is_emptied)
), gone as (
    delete from {schema}.nodes m
    using asked a
    join {schema}.nodes n on n.workflow_id = a.workflow_id and n.number = a.number
    where a.is_emptied and m.workflow_id = n.workflow_id and m.member_of = n.number
      and m.number >= n.first_member and m.number < n.first_member::bigint + n.members
), again as (
    update {schema}.nodes n
    set state = a.state, ended_at = null, error = null,
        first_member = case when not a.is_emptied then n.first_member end, members = case when not a.is_emptied then n.members end
    from asked a
    where n.workflow_id = a.workflow_id and n.number = a.number
), opened as (
    update {schema}.edges e
    set state = 'OPEN'
    from asked a
    where e.workflow_id = a.workflow_id and e.parent = a.number and e.state <> 'OPEN'
      and (
          (e.workflow_id, e.child) in (select o.workflow_id, o.number from asked o)
          or exists (
              select from {schema}.nodes c
              where c.workflow_id = e.workflow_id and c.number = e.child and c.state || '' = 'PENDING'
          )
      )
), happened as (
    insert into {schema}.outbox (workflow_id, node)
    select r.id, null::integer from root r union all select c.id, null::integer from child c
)
select case when exists (select from root) and (select pg_notification_queue_usage()) < 0.5 then pg_notify(%(channel)s, 'w') end
