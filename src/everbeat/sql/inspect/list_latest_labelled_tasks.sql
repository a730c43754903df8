-- List tasks with labels by their latest event, newest first, as inspect/list_latest_tasks. The statement sorts the tasks that it examines: of
-- those with the rarest label, the newest `most` (null: all). It reads them 1,000 at a time, so that the planner never sorts the table of labels.
-- The offset keeps the planner from comparing all failed tasks of each partition with the ids. PostgreSQL sorts the ids once for each partition,
-- which is quick only if they are in ascending order.
with recursive labelled (id, place) as (
    select first.id, row_number() over (order by first.id desc)
    from (
{fragment/labelled_ids}
        limit 1000
    ) first
    union all
    select next.id, p.place + next.place
    from labelled p
    cross join lateral (
        select n.id, row_number() over (order by n.id desc) as place
        from (
            select l.id from {schema}.labels l
            where (l.key, l.value, l.id) >= (%(label)s::text, %(label_value)s::text, %(first_id)s::uuid)
              and (l.key, l.value, l.id) < (%(label)s::text, %(label_value)s::text, p.id)
            order by l.key desc, l.value desc, l.id desc
            limit 1000
        ) n
    ) next
    where p.place %% 1000 = 0 and (%(most)s::integer is null or p.place < %(most)s)
), looked as materialized (
    select t.id, event.at
    from (
        select t.* from {schema}.all_tasks t
        where t.id = any(array(select l.id from labelled l order by l.id)) and ({fragment/live_states})
        offset 0
    ) t
    {fragment/last_event}
    where {fragment/task_scope} and {fragment/task_filters}
), page as materialized (
    select l.id, l.at
    from looked l
    where %(before)s::uuid is null or (l.at, l.id) < (
        select event.at, t.id from {fragment/tasks_with_last_event} where t.id = %(before)s
    )
    order by l.at desc, l.id desc
    limit %(limit)s
)
select {fragment/task_columns}
from page event
join {schema}.all_tasks t on t.id = event.id
where t.id = any(array(select p.id from page p))
order by event.at desc, event.id desc
