-- Read `limit` published rows, starting after a position. Delete rows whose task is no longer PENDING or has been claimed since. Return the
-- rows that were published more than `older_ms` ago and whose tasks are due and not paused. The messages of these rows might be lost, or a
-- frozen worker might hold them. The first row contains the number of rows read and deleted, and the next position (null: the beginning).
with seen as materialized (
    select o.id, o.task_id, o.queue, o.fence, o.place, o.published_at
    from {schema}.message_outbox o
    where o.place is not null
      and (o.queue, o.published_at, o.id) > (%(queue)s::text, %(published_at)s::timestamptz, %(id)s::bigint)
    order by o.queue, o.published_at, o.id
    limit %(limit)s
), judged as materialized (
    select s.*, coalesce(t.state = 'PENDING' and t.fence = s.fence, false) as waits,
        coalesce(
            s.published_at <= statement_timestamp() - %(older_ms)s * interval '1 millisecond' and t.enqueued_at <= statement_timestamp()
            and not exists (
                select from {schema}.pauses p where (p.kind = 'queue' and p.name = t.queue) or (p.kind = 'task' and p.name = t.name)
            ), false
        ) as doubtful
    from seen s
    left join lateral (select * from {schema}.tasks t where t.id = s.task_id limit 1) t on true
), gone as (
    delete from {schema}.message_outbox o where o.id = any(array(select j.id from judged j where not j.waits)) returning o.id
), last as (
    select s.queue, s.published_at, s.id from seen s where (select count(*) from seen) = %(limit)s
    order by s.queue desc, s.published_at desc, s.id desc limit 1
)
select null::bigint as id, null::bigint as place, null::uuid as task_id, null::text as of_queue,
    (select count(*) from seen)::integer as seen, (select count(*) from gone)::integer as gone, l.queue, l.published_at, l.id as last_id
from (select) nothing left join last l on true
union all
select j.id, j.place, j.task_id, j.queue, null, null, null, null, null
from judged j where j.waits and j.doubtful
