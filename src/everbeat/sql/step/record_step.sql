-- Record the result of a step, which is also a sign of life. Requires the current claim_id; no row means a lost lease. The task's state
-- does not change. A recorded step is never overwritten, so a repeated call changes nothing and returns the same result as the first.
with held as (
    update {schema}.tasks t
    set progress_at = statement_timestamp()
    where t.id = %(id)s and t.claim_id = %(claim_id)s and t.state = 'RUNNING'
    returning t.id, t.attempt
), recorded as (
    insert into {schema}.steps (task_id, kind, name, result, attempt, digest)
    select h.id, 'step', %(name)s::text, %(result)s::text::json, h.attempt, %(digest)s::text from held h
    on conflict (task_id, kind, name) do nothing
)
select h.id from held h
