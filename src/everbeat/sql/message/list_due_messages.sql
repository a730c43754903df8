-- Return the messages to publish next: the first due rows of each queue. A queue has at most `window` messages in the stream, and the reply
-- contains at most `portion` messages in all. Rows are deleted if their tasks are no longer PENDING, have been claimed since, are marked,
-- or belong to a paused task function. Workers are notified of a marked task when it is marked, and also poll for it; a resume notifies all
-- workers. Rows of a paused queue stay. The first row contains the milliseconds until the next row is due and the number of deleted rows.
-- The first row also lists the queues whose due rows are waiting because their window is full, each with the number of its last row.
with recursive {fragment/queues_of_messages}, open as materialized (
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
        t.state = 'PENDING' and t.fence = f.fence and not {schema}.is_marked(t.needs) and not exists (select from {schema}.pauses p where p.kind = 'task' and p.name = t.name), false
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
