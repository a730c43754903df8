-- Seal a batch and mark it as cancelled, unless it has ended. The event makes a worker check the batch. A repeated call changes nothing. Return
-- whether the batch exists, and whether it has ended.
with marked as (
    update {schema}.batches b
    set sealed_at = coalesce(b.sealed_at, statement_timestamp()), cancelled_at = statement_timestamp()
    where b.id = %(id)s and b.ended_at is null and b.cancelled_at is null and b.waiter_id is null
    returning b.id
), noted as (
    insert into {schema}.batch_events (batch_id, number) select m.id, 0 from marked m
)
select b.ended_at is not null as has_ended from {schema}.batches b where b.id = %(id)s and b.waiter_id is null
