-- List PENDING tasks that no live worker can take, by queue and name, most frequent first. A worker that registered no names is assumed to
-- know all names.
with living as materialized (
    select w.id, w.queues, {schema}.object_of(w.metadata) -> 'tasks' as names
    {fragment/from_live_workers}
), waiting as materialized (
    select t.queue, t.name, count(*) as waiting
    from (
        (select queue, name from {schema}.tasks where state = 'PENDING' and serial is null and needs_id is null limit 100000)
        union all
        (select queue, name from {schema}.tasks where state = 'PENDING' and serial is null and needs_id is not null limit 100000)
        union all
        (
            select queue, name from {schema}.tasks
            where serial is not null and state in ('PENDING', 'CLAIMED', 'RUNNING') and state = 'PENDING' limit 100000
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
