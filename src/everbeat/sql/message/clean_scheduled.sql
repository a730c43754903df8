-- Read `limit` rows that are due later, starting after a position. Delete rows whose task is no longer PENDING or has been claimed since,
-- because a task can finish long before its row is due. Return the next position, or no row at the end.
with seen as materialized (
    select o.id, o.task_id, o.queue, o.fence, o.due_at
    from {schema}.message_outbox o
    where o.place is null and (o.queue, o.due_at, o.id) > (%(queue)s::text, %(due_at)s::timestamptz, %(id)s::bigint)
    order by o.queue, o.due_at, o.id
    limit %(limit)s
), gone as (
    delete from {schema}.message_outbox o
    where o.id = any(array(
        select s.id from seen s
        left join lateral (select t.state, t.fence from {schema}.tasks t where t.id = s.task_id limit 1) t on true
        where not coalesce(t.state = 'PENDING' and t.fence = s.fence, false)
    ))
    returning o.id
)
select s.queue, s.due_at, s.id, (select count(*) from gone) as gone
from seen s where (select count(*) from seen) = %(limit)s
order by s.queue desc, s.due_at desc, s.id desc limit 1
