-- Delete the labels of tasks and workflows that no longer exist: one step of a scan of the index by id. A dropped partition of `history` leaves
-- them behind. A task and its labels are inserted together, and a task moves in one statement. So a label without its task is useless. Return
-- the position at which the next step begins, or null at the end.
with looked as materialized (
    select l.id from {schema}.labels l
    where l.id > %(after)s and l.id < %(until)s
    order by l.id
    limit %(limit)s
), stray as materialized (
    select l.id from looked l
    where not exists (select from {schema}.all_tasks t where t.id = l.id) and not exists (select from {schema}.workflows w where w.id = l.id)
), gone as (
    delete from {schema}.labels l where l.id = any(array(select s.id from stray s))
)
select case when (select count(*) from looked) = %(limit)s then (select id from looked order by id desc limit 1) end as next_after
