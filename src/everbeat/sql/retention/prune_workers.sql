-- Delete workers that ended long ago and hold no task: one step of a scan of the primary key. An ended worker claims no more tasks, so it
-- cannot hold one later. Return the position at which the next step begins, or null at the end.
with looked as materialized (
    select w.id from {schema}.workers w
    where w.id > %(after)s
    order by w.id
    limit %(limit)s
), old as materialized (
    select w.id from {schema}.workers w
    where w.id = any(array(select l.id from looked l)) and w.ended_at < statement_timestamp() - %(hours)s * interval '1 hour'
      and not exists (select from {schema}.tasks t where t.claimed_by_worker_id = w.id and t.state in ('CLAIMED', 'RUNNING'))
    for update of w skip locked
), gone as (
    delete from {schema}.workers w where w.id = any(array(select o.id from old o)) returning 1
)
select (select max(id) from looked having count(*) = %(limit)s) as next_after, (select count(*) from gone) as workers
