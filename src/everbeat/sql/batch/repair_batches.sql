-- Correct the number of tasks of sealed batches without live tasks and without events that have not ended: another program has deleted tasks of
-- theirs. The event makes a worker check the batch, which then ends. A concurrent call sets the same number. Return the number of batches.
with stuck as materialized (
    select b.id
    from {schema}.batches b
    where b.ended_at is null and b.sealed_at < statement_timestamp() - interval '10 seconds'
      and not exists (select from {schema}.batch_events e where e.batch_id = b.id)
      and not exists (select from {schema}.tasks t where t.batch_id = b.id and t.state in ('PENDING', 'CLAIMED', 'RUNNING'))
    order by b.id
    limit %(limit)s
    for no key update of b skip locked
), corrected as (
    update {schema}.batches b
    set total = least(b.total, b.completed + b.failed + b.cancelled + b.expired)
    from stuck s where b.id = s.id
    returning b.id
), noted as (
    insert into {schema}.batch_events (batch_id, number) select c.id, 0 from corrected c
    returning 1
)
select count(*) from noted
