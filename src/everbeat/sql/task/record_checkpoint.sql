-- Store a checkpoint of running code, which is also a sign of life. Requires the current claim_id. The task's state does not change. A
-- repeated checkpoint changes nothing. Neither does a checkpoint that arrives, over an abandoned connection, after a later checkpoint of
-- the same attempt. In both cases, the statement returns the same result as the first call.
with held as materialized (
    select t.id, t.checkpoint_number from {schema}.tasks t
    where t.id = %(id)s and t.claim_id = %(claim_id)s and t.state = 'RUNNING'
    for no key update
), stored as (
    update {schema}.tasks t
    set checkpoint = %(checkpoint)s::json, checkpoint_number = %(number)s, progress = coalesce(%(progress)s::json, t.progress),
        progress_at = statement_timestamp()
    from held h
    where t.id = h.id and h.checkpoint_number < %(number)s
)
select h.id from held h
