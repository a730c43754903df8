-- Takes away published rows whose task is not PENDING any more or was claimed since; answers how many that were, and how many were looked at:
-- at most `limit` of each queue, oldest first.
with recursive queue (name) as (
    (select o.queue from {schema}.message_outbox o where o.place is not null order by o.queue limit 1)
    union all
    select further.queue
    from queue q
    cross join lateral (
        select o.queue from {schema}.message_outbox o where o.place is not null and o.queue > q.name order by o.queue limit 1
    ) further
), lying as materialized (
    select o.id, o.task_id, o.fence
    from queue q
    cross join lateral (
        select * from {schema}.message_outbox o where o.place is not null and o.queue = q.name order by o.published_at, o.id limit %(limit)s
    ) o
), over as materialized (
    select l.id from lying l
    left join lateral (select t.state, t.fence from {schema}.tasks t where t.id = l.task_id limit 1) t on true
    where not coalesce(t.state = 'PENDING' and t.fence = l.fence, false)
), gone as (
    delete from {schema}.message_outbox o where o.id = any(array(select over.id from over)) returning o.id
)
select (select count(*) from gone)::integer as gone, (select count(*) from lying)::integer as lying
