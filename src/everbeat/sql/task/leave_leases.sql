-- Record that a recovery hook left these leases unchanged. Each lease is recorded once, no matter how often the hook is called.
with asked as (
    select * from unnest(%(ids)s::uuid[], %(claim_ids)s::uuid[]) as a (id, claim_id)
), held as materialized (
    select t.id
    from asked a
    cross join lateral (select * from {schema}.tasks t where t.id = a.id for no key update skip locked) t
    where t.claim_id = a.claim_id and t.left_claim_id is distinct from a.claim_id
)
update {schema}.tasks t
set left_claim_id = t.claim_id, left_at = statement_timestamp()
from held h
where t.id = h.id
returning t.id
