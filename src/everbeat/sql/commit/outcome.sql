-- What became of an attempt that its own code was to settle: its outcome; else whether it still holds the task.
-- No second value: a transaction that has not ended holds the row, or the task is gone.
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
