-- Store the progress of running code. Requires the current claim_id. The task's state does not change.
update {schema}.tasks t
set progress = %(progress)s::json, progress_at = statement_timestamp()
where t.id = %(id)s and t.claim_id = %(claim_id)s and t.state = 'RUNNING'
returning t.id
