-- List PENDING tasks that no live worker can take, by queue and name, most frequent first. A worker that registered no names is assumed to
-- know all names. Only the first 100,000 tasks of each type are read. The order makes the planner read an index even if most rows match.
with living as materialized (
    select w.id, w.queues, {schema}.object_of(w.metadata) -> 'tasks' as names
    {fragment/from_live_workers}
), waiting as materialized (
    select t.queue, t.name, count(*) as waiting
    from (
        (
            select t.queue, t.name from {schema}.tasks t
            where t.state = 'PENDING' and t.serial is null and t.needs_id is null
            order by t.queue, t.priority, t.enqueued_at, t.id limit 100000
        )
        union all
        (
            select t.queue, t.name from {schema}.tasks t
            where t.state = 'PENDING' and t.serial is null and t.needs_id is not null
            order by t.needs_id, t.queue, t.priority, t.enqueued_at, t.id limit 100000
        )
        union all
        (
            select t.queue, t.name from {schema}.tasks t
            where t.state = 'PENDING' and t.serial is not null order by t.serial, t.serial_at, t.id limit 100000
        )
    ) t
    group by t.queue, t.name
)
select
    w.queue, w.name, w.waiting,
    exists (select from living l where l.queues is null or w.queue = any(l.queues)) as served
from waiting w
where not exists (select from living l where (l.queues is null or w.queue = any(l.queues)) and coalesce(l.names ? w.name, true))
order by w.waiting desc, w.queue, w.name
limit 50
