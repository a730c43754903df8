-- Delete old recoveries of tasks that another program has deleted: one step of a scan of the primary key, which grows with time. Return the
-- position at which the next step begins, or null at the end or as soon as a step finds no old row.
with looked as materialized (
    select r.id, r.task_id, r.noticed_at < statement_timestamp() - %(hours)s * interval '1 hour' as is_old from {schema}.recoveries r
    where r.id > %(after)s
    order by r.id
    limit %(limit)s
), stray as materialized (
    select l.id from looked l
    where l.is_old and not exists (select from {schema}.tasks t where t.id = l.task_id)
), gone as (
    delete from {schema}.recoveries r where r.id = any(array(select s.id from stray s)) returning 1
)
select
    (select max(id) from looked having count(*) = %(limit)s and bool_or(is_old)) as next_after,
    (select count(*) from gone) as recoveries
