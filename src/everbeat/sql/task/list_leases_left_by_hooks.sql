-- Return which of these leases were left unchanged by a recovery hook.
select t.id from {schema}.tasks t where t.id = any(%(ids)s::uuid[]) and t.left_claim_id = t.claim_id
