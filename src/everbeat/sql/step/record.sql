-- Records what a step returned, which is also a sign of life; only for whoever holds the claim_id. Changes no state.
-- One that is recorded stays as it is, so a repeated call changes nothing and is answered like the first; zero rows is a lost lease.
with held as (
    update {schema}.tasks t
    set progress_at = statement_timestamp()
    where t.id = %(id)s and t.claim_id = %(claim_id)s and t.state = 'RUNNING'
    returning t.id, t.attempt
), recorded as (
    insert into {schema}.steps (task_id, kind, name, result, attempt)
    select h.id, 'step', %(name)s::text, %(result)s::text::json, h.attempt from held h
    on conflict (task_id, kind, name) do nothing
)
select h.id from held h
