-- Stores what running code has finished of its work, which is also a sign of life; only for whoever holds the claim_id.
-- Changes no state. A checkpoint that arrives after a later one of the same attempt, from a connection that was given up, changes
-- nothing, and neither does one that is repeated; both are answered like the first.
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
