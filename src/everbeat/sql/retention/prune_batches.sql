-- Delete batches that ended long ago: one step of a scan of the primary key. An old gather that has not ended is deleted, too, if neither its
-- task nor a child of it is live. Its task then ended before it had sent all children. Return the position at which the next step begins, or null
-- at the end.
with looked as materialized (
    select b.id from {schema}.batches b
    where b.id > %(after)s and b.id < %(until)s
    order by b.id
    limit %(limit)s
), old as materialized (
    select b.id from {schema}.batches b
    where b.id = any(array(select l.id from looked l))
      and (
          b.ended_at < statement_timestamp() - %(hours)s * interval '1 hour'
          or b.ended_at is null and b.waiter_id is not null and b.created_at < statement_timestamp() - %(hours)s * interval '1 hour'
             and coalesce((select t.state from {schema}.tasks t where t.id = b.waiter_id), '') not in ('PENDING', 'CLAIMED', 'RUNNING')
             and not exists (select from {schema}.tasks t where t.batch_id = b.id and t.state in ('PENDING', 'CLAIMED', 'RUNNING'))
      )
    order by b.id
    for update skip locked
), gone as (
    delete from {schema}.batches b where b.id = any(array(select o.id from old o)) returning b.id
), gone_events as (
    delete from {schema}.batch_events e where e.batch_id = any(array(select g.id from gone g)) returning 1
)
select
    case when (select count(*) from looked) = %(limit)s then (select l.id from looked l order by l.id desc limit 1) end as next_after
