-- Return which of these leases have been lost, and which of these tasks have a cancel request. Workers poll with this statement when
-- notifications do not arrive.
select h.id, h.claim_id, case when t.id is null then 'lost' else 'cancel' end as verdict
from unnest(%(ids)s::uuid[], %(claim_ids)s::uuid[]) as h (id, claim_id)
left join {schema}.tasks t on t.id = h.id and t.claim_id = h.claim_id
where t.id is null or t.cancel_requested_at is not null
