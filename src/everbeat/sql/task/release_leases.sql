-- Release claimed tasks without charging an attempt: CLAIMED -> PENDING. Requires the current claim_id. No attempt row is written.
-- Without `limit 1`, the planner would move the condition on the state into the lookup and read the whole index of leases for each row.
with asked as (
    select * from unnest(%(ids)s::uuid[], %(claim_ids)s::uuid[]) as a (id, claim_id)
), held as materialized (
    select t.id from asked a
    cross join lateral (select * from {schema}.tasks t where t.id = a.id limit 1 for no key update) t
    where t.claim_id = a.claim_id and t.state = 'CLAIMED'
), released as (
    update {schema}.tasks t
    set state = 'PENDING', claim_id = null, claim_call = null, claimed_at = null, claimed_by_worker_id = null
    from held h where t.id = h.id
    returning t.id, t.queue
)
select r.id, case when (select pg_notification_queue_usage()) < 0.5 then pg_notify(%(channel)s, 't:' || left(r.queue, 1000)) end from released r
