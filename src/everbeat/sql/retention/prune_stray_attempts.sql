-- Delete old attempts of tasks that another program has deleted: one step of a scan of the primary key. Return the position at which the
-- next step begins, or null at the end.
with looked as materialized (
    select a.task_id from {schema}.attempts a
    where a.task_id > %(after)s and a.task_id < %(until)s
    order by a.task_id
    limit %(limit)s
), stray as materialized (
    select l.task_id from looked l
    where not exists (select from {schema}.tasks t where t.id = l.task_id)
), gone as (
    delete from {schema}.attempts a
    where a.task_id = any(array(select s.task_id from stray s)) and a.ended_at < statement_timestamp() - %(hours)s * interval '1 hour'
    returning 1
)
select
    case when (select count(*) from looked) = %(limit)s then (select task_id from looked order by task_id desc limit 1) end as next_after,
    (select count(*) from gone) as attempts
