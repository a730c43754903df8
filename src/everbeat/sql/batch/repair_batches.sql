-- Write an event for sealed batches without live tasks and without events that have not ended: another program has deleted tasks of theirs. The
-- event corrects their number of tasks, so a worker then ends them. Return their number.
with stuck as materialized (
    select b.id, b.completed + b.failed + b.cancelled + b.expired - b.total as surplus
    from {schema}.batches b
    where b.ended_at is null and b.sealed_at < statement_timestamp() - interval '10 seconds'
      and not exists (select from {schema}.batch_events e where e.batch_id = b.id)
      and not exists (select from {schema}.tasks t where t.batch_id = b.id and t.state in ('PENDING', 'CLAIMED', 'RUNNING'))
    order by b.id
    limit %(limit)s
), noted as (
    insert into {schema}.batch_events (batch_id, number) select s.id, least(s.surplus, 0) from stuck s
    returning 1
)
select count(*) from noted
