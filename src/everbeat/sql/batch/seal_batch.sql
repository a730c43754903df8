-- Seal a batch, so that it can end. The event makes a worker check the batch. A repeated call changes nothing. Return whether the batch
-- exists. The batch of a gather is not found.
with sealed as (
    update {schema}.batches b
    set sealed_at = statement_timestamp()
    where b.id = %(id)s and b.sealed_at is null and b.waiter_id is null
    returning b.id
), noted as (
    insert into {schema}.batch_events (batch_id, number) select s.id, 0 from sealed s
)
select exists (select from {schema}.batches b where b.id = %(id)s and b.waiter_id is null) as found
