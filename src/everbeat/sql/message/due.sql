-- What is to be published next: of each queue its first due rows, so many that no more than `window` are out, `portion` in all. Rows of tasks
-- that are not PENDING any more, were claimed since, are marked (workers are told of those when they are marked, and look for them), or
-- are of a paused task function are deleted instead (who resumes that tells all workers);
-- those of a paused queue wait. The first row tells the milliseconds until the next row is due, how many were taken
-- away, and the queues of which rows that are due wait for room in their window, each with the number of the last of them.
with recursive queue (name) as (
    (select o.queue from {schema}.message_outbox o where o.place is null order by o.queue limit 1)
    union all
    select further.queue
    from queue q
    cross join lateral (
        select o.queue from {schema}.message_outbox o where o.place is null and o.queue > q.name order by o.queue limit 1
    ) further
), open as materialized (
    select q.name, greatest(0, %(window)s - (
        select count(*) from (
            select from {schema}.message_outbox o where o.place is not null and o.queue = q.name limit %(window)s
        ) lying
    ))::integer as room
    from queue q
    where not exists (select from {schema}.pauses p where p.kind = 'queue' and p.name = q.name)
), found as materialized (
    select first.id, first.task_id, first.queue, first.fence, first.times
    from open
    cross join lateral (
        select * from {schema}.message_outbox o
        where o.place is null and o.queue = open.name and o.due_at <= statement_timestamp()
        order by o.due_at, o.id limit least(open.room, %(portion)s)
    ) first
    limit %(portion)s
), judged as materialized (
    select f.*, coalesce(
        t.state = 'PENDING' and t.fence = f.fence and t.needs_id is null and not exists (select from {schema}.pauses p where p.kind = 'task' and p.name = t.name), false
    ) as waits
    from found f
    left join lateral (select * from {schema}.tasks t where t.id = f.task_id limit 1) t on true
), gone as (
    delete from {schema}.message_outbox o where o.id = any(array(select j.id from judged j where not j.waits)) returning o.id
)
select null::bigint as id, null::uuid as task_id, null::text as queue, null::bigint as fence, null::integer as times, null::text as reason,
    (
        select extract(epoch from min(least(next.due_at, statement_timestamp() + interval '1 day')) - statement_timestamp()) * 1000
        from queue q
        cross join lateral (
            select o.due_at from {schema}.message_outbox o
            where o.place is null and o.queue = q.name and o.due_at > statement_timestamp() order by o.due_at limit 1
        ) next
    )::float8 as due_in_ms,
    (select count(*) from gone)::integer as gone,
    (
        select json_object_agg(o.queue, o.id) from open
        cross join lateral (
            select o.queue, o.id from {schema}.message_outbox o
            where o.place is null and o.queue = open.name and o.due_at <= statement_timestamp() order by o.due_at desc, o.id desc limit 1
        ) o
        where open.room = 0
    ) as full_queues
union all
select j.id, j.task_id, j.queue, j.fence, j.times,
    case when j.fence > 0 then (
        select case
            when r.noticed_by = 'startup' then 'Worker restarted'
            when r.noticed_by in ('session', 'age') then 'Worker ' || r.worker_id || ' stopped responding'
            when r.noticed_by = 'child_exit' then 'A process of worker ' || r.worker_id || ' ended: ' || r.cause
            when r.noticed_by = 'progress' then 'The task stalled in worker ' || r.worker_id || ': ' || r.cause
            when r.noticed_by = 'operator' then 'An operator released worker ' || r.worker_id
            else 'Worker ' || r.worker_id || ' lost the task: ' || r.cause
        end
        from {schema}.recoveries r where r.task_id = j.task_id and r.fence = j.fence limit 1
    ) end,
    null, null, null
from judged j
where j.waits
