-- Cancel the descendants of a task that have not ended: PENDING | CLAIMED -> CANCELLED at once; for RUNNING tasks, request a cancel. Return
-- how many tasks this call cancelled or requested to stop. Repeat the call until it returns 0. No task is then left out, because a task
-- with a cancel request sends no more children. If a claim_id is given, the code of the task has raised Cancel, and its end is written
-- afterwards. This requires the task's current claim_id, and locks the task first, so that a lost lease cancels nothing. When a workflow is
-- retried, its nodes get new tasks. If a node's earlier task did not complete, the new task continues from the earlier task's steps and
-- owns its children. An earlier task is therefore an owner too if the steps of this task name one of its children.
with recursive {fragment/owners_of_children}, family (id) as (
    select t.id from owner o join {schema}.all_tasks t on t.parent_id = o.id
    union
    select t.id from family f join {schema}.all_tasks t on t.parent_id = f.id
), fenced as materialized (
    select t.id from {schema}.tasks t
    where t.id = %(id)s and t.claim_id = %(claim_id)s::uuid and t.state = 'RUNNING'
    for no key update
), held as materialized (
    select t.id, t.state, t.attempt from {schema}.tasks t
    where t.id = any(array(select f.id from family f)) and t.state in ('PENDING', 'CLAIMED', 'RUNNING') and t.cancel_requested_at is null
      and (%(claim_id)s::uuid is null or exists (select from fenced))
    order by t.id
    limit 10000
    for no key update
), ended as (
    update {schema}.tasks t
    set state = 'CANCELLED', cancelled_at = statement_timestamp(), cancel_requested_at = statement_timestamp(),
        claim_id = null, claim_call = null, next_retry_at = null,
        error = json_build_object(
            'code', 'TASK_CANCELLED', 'message', 'cancelled with its parent ' || %(id)s::text
        )
    from held h where t.id = h.id and h.state in ('PENDING', 'CLAIMED')
    returning t.id, t.queue, t.serial, coalesce(t.workflow_id, t.batch_id) as whole_id, h.state as was
), asked as (
    update {schema}.tasks t
    set cancel_requested_at = statement_timestamp()
    from held h where t.id = h.id and h.state = 'RUNNING'
    returning t.id
), {fragment/notify_of_cancelled}
select (select count(*) from ended) + (select count(*) from asked) as changed, (select hints from hint) as hints
