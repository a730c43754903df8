-- Delete the items of streams whose task has been deleted: one step of a walk through the tasks that have items. The walk searches the primary
-- key once for each task, however many items it has. A step checks up to 100 tasks and deletes a limited number of items. Return the
-- task with which the next step begins, or null at the end.
with recursive walk (task_id, place) as (
    (select s.task_id, 1 from {schema}.stream_items s
     where s.task_id >= %(after)s and s.task_id < %(until)s order by s.task_id limit 1)
    union all
    select (
        select s.task_id from {schema}.stream_items s
        where s.task_id > w.task_id and s.task_id < %(until)s order by s.task_id limit 1
    ), w.place + 1
    from walk w where w.task_id is not null and w.place < 100
), stray as materialized (
    select w.task_id from walk w
    where w.task_id is not null
      and not exists (select from {schema}.tasks t where t.id = w.task_id)
      and not exists (select from {schema}.history h where h.id = w.task_id)
), doomed as materialized (
    select i.task_id, i.name, i.number
    from stray s
    cross join lateral (
        select x.task_id, x.name, x.number from {schema}.stream_items x
        where x.task_id = s.task_id order by x.name, x.number limit %(limit)s
    ) i
    order by i.task_id, i.name, i.number
    limit %(limit)s
), gone as (
    delete from {schema}.stream_items x using doomed d
    where x.task_id = d.task_id and x.name = d.name and x.number = d.number
)
select case
    when (select count(*) from doomed) = %(limit)s then (select d.task_id from doomed d order by d.task_id desc limit 1)
    when (select count(w.task_id) from walk w) = 100 then (select w.task_id from walk w order by w.task_id desc nulls last limit 1)
end as next_after
