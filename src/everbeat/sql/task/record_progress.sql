-- Stores what running code reported of itself; only for whoever holds the claim_id. Changes no state.
update {schema}.tasks t
set progress = %(progress)s::json, progress_at = statement_timestamp()
where t.id = %(id)s and t.claim_id = %(claim_id)s and t.state = 'RUNNING'
returning t.id
