-- Delete old ended tasks with their attempts, recoveries, steps, signals and labels: one step of a scan of the primary key. A step reads a limited
-- number of rows and skips live, recent and locked tasks. Tasks of an existing workflow are skipped too, because they can still be retried. A
-- child in a batch is skipped while its parent lives, because the parent of a gather reads its outcome.
-- Return the position at which the next step begins, or null at the end.
with looked as materialized (
    select t.id from {schema}.tasks t
    where t.id > %(after)s and t.id < %(until)s
    order by t.id
    limit %(limit)s
), last as materialized (
    select l.id from looked l order by l.id desc limit 1
), old as materialized (
    select t.id from {schema}.tasks t
    where t.id > %(after)s and t.id <= (select id from last)
      and t.state in ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED')
      and greatest(t.completed_at, t.failed_at, t.cancelled_at, t.expired_at) < statement_timestamp() - %(hours)s * interval '1 hour'
      and not exists (select from {schema}.workflows w where w.id = t.workflow_id)
      and (
          t.batch_id is null
          or coalesce((select p.state from {schema}.tasks p where p.id = t.parent_id), '') not in ('PENDING', 'CLAIMED', 'RUNNING')
      )
    order by t.id
    for update of t skip locked
), gone as (
    delete from {schema}.tasks t where t.id = any(array(select o.id from old o)) returning t.id
), gone_attempts as (
    delete from {schema}.attempts a where a.task_id = any(array(select g.id from gone g)) returning 1
), gone_recoveries as (
    delete from {schema}.recoveries r where r.task_id = any(array(select g.id from gone g)) returning 1
), gone_steps as (
    delete from {schema}.steps s where s.task_id = any(array(select g.id from gone g)) returning 1
), gone_labels as (
    delete from {schema}.labels l where l.id = any(array(select g.id from gone g))
), gone_signals as (
    delete from {schema}.signals s where s.target = any(array(select g.id from gone g)) returning 1
)
select
    case when (select count(*) from looked) = %(limit)s then (select id from last) end as next_after,
    (select count(*) from gone) as tasks, (select count(*) from gone_attempts) as attempts, (select count(*) from gone_recoveries) as recoveries,
    (select count(*) from gone_steps) as steps, (select count(*) from gone_signals) as signals
