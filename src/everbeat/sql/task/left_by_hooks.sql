-- The leases among these that a recovery hook left as they are.
select t.id from {schema}.tasks t where t.id = any(%(ids)s::uuid[]) and t.left_claim_id = t.claim_id
