-- Wait for the end of a gather. If it has not ended, record that the task is waiting for it; the end then makes the task due. Requires the
-- current claim_id; no row means a lost lease. The end of the batch takes the same lock first, so it is never missed. The task that waits
-- can be a new task of a workflow's node, which continues from the steps of the earlier task. A gather without a row was deleted, so it
-- has ended. Return whether the gather has ended. Lock order: batch, then task.
with whole as materialized (
    select b.id, b.ended_at from {schema}.batches b where b.id = %(batch_id)s for no key update
), held as materialized (
    select t.id, exists (select from whole w where w.ended_at is null) as waits
    from {schema}.tasks t
    where t.id = %(id)s and t.claim_id = %(claim_id)s and t.state = 'RUNNING' and (select count(*) from whole) >= 0
    for no key update
), joined as (
    update {schema}.batches b
    set waiter_id = h.id
    from held h where b.id = %(batch_id)s and h.waits and b.waiter_id is distinct from h.id
), marked as (
    update {schema}.tasks t
    set waits_for = case when h.waits then 'gather/' || %(step)s::text end,
        wake_at = case when h.waits then statement_timestamp() + interval '100 years' end,
        progress_at = statement_timestamp()
    from held h where t.id = h.id
)
select not h.waits as ended from held h
