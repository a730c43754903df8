-- Cancel the live tasks of a batch and their descendants: PENDING | CLAIMED -> CANCELLED at once; for RUNNING tasks, request a cancel. Return
-- how many tasks this call cancelled or requested to stop. Repeat the call until it returns 0. No task is then left out. Only running
-- tasks can add tasks to a sealed batch, and a task with a cancel request sends no more.
with recursive family (id) as (
    select t.id from {schema}.tasks t where t.batch_id = %(id)s and t.state in ('PENDING', 'CLAIMED', 'RUNNING')
    union
    select t.id from family f join {schema}.all_tasks t on t.parent_id = f.id
), held as materialized (
    select t.id, t.state from {schema}.tasks t
    where t.id = any(array(select f.id from family f)) and t.state in ('PENDING', 'CLAIMED', 'RUNNING') and t.cancel_requested_at is null
    order by t.id
    limit 10000
    for no key update
), ended as (
    update {schema}.tasks t
    set state = 'CANCELLED', cancelled_at = statement_timestamp(), cancel_requested_at = statement_timestamp(),
        claim_id = null, claim_call = null, next_retry_at = null,
        error = json_build_object('code', 'TASK_CANCELLED', 'message', 'cancelled with its batch ' || %(id)s::text)
    from held h where t.id = h.id and h.state in ('PENDING', 'CLAIMED')
    returning t.id, t.queue, t.serial, coalesce(t.workflow_id, t.batch_id) as whole_id, h.state as was
), asked as (
    update {schema}.tasks t
    set cancel_requested_at = statement_timestamp()
    from held h where t.id = h.id and h.state = 'RUNNING'
    returning t.id
), {fragment/notify_of_cancelled}
select (select count(*) from ended) + (select count(*) from asked) as changed, (select hints from hint) as hints
