-- Stores what running code has finished of its work, which is also a sign of life; only for whoever holds the claim_id.
-- Changes no state.
update {schema}.tasks t
set checkpoint = %(checkpoint)s::json, progress = coalesce(%(progress)s::json, t.progress), progress_at = statement_timestamp()
where t.id = %(id)s and t.claim_id = %(claim_id)s and t.state = 'RUNNING'
returning t.id
