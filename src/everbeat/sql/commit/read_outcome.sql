-- Return the outcome of an attempt that was to be settled by its own code, or else whether the attempt still holds the task. The second
-- value is null if an open transaction has locked the row, or if the task was deleted.
with held as materialized (
    select t.claim_id is not distinct from %(claim_id)s and t.state = 'RUNNING' as is_held
    from {schema}.tasks t
    where t.id = %(id)s
    for no key update skip locked
)
select
    (select a.outcome from {schema}.attempts a where a.task_id = %(id)s and a.claim_id = %(claim_id)s limit 1) as outcome,
    (select h.is_held from held h) as is_held,
    exists (select from {schema}.tasks t where t.id = %(id)s) as is_there
