-- Delete captured logs that are old, or whose task has been deleted: one step of a walk through the tasks that have logs. The
-- walk searches the primary key once for each task, however many parts it has. A step checks up to 100 tasks and deletes a limited number of
-- parts. Return the task with which the next step begins, or null at the end.
with recursive walk (task_id, place) as (
    (select l.task_id, 1 from {schema}.attempt_logs l
     where l.task_id >= %(after)s and l.task_id < %(until)s order by l.task_id limit 1)
    union all
    select (
        select l.task_id from {schema}.attempt_logs l
        where l.task_id > w.task_id and l.task_id < %(until)s order by l.task_id limit 1
    ), w.place + 1
    from walk w where w.task_id is not null and w.place < 100
), judged as materialized (
    select w.task_id, not exists (select from {schema}.tasks t where t.id = w.task_id)
        and not exists (select from {schema}.history h where h.id = w.task_id) as is_stray
    from walk w where w.task_id is not null
), doomed as materialized (
    select i.task_id, i.attempt, i.claim_id, i.part
    from judged j
    cross join lateral (
        select x.task_id, x.attempt, x.claim_id, x.part from {schema}.attempt_logs x
        where x.task_id = j.task_id and (j.is_stray or x.written_at < statement_timestamp() - %(hours)s * interval '1 hour')
        order by x.attempt, x.claim_id, x.part limit %(limit)s
    ) i
    order by i.task_id, i.attempt, i.claim_id, i.part
    limit %(limit)s
), gone as (
    delete from {schema}.attempt_logs x using doomed d
    where x.task_id = d.task_id and x.attempt = d.attempt and x.claim_id = d.claim_id and x.part = d.part
)
select case
    when (select count(*) from doomed) = %(limit)s then (select d.task_id from doomed d order by d.task_id desc limit 1)
    when (select count(w.task_id) from walk w) = 100 then (select w.task_id from walk w order by w.task_id desc nulls last limit 1)
end as next_after
