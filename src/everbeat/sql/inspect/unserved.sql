-- PENDING tasks that no live worker takes, by queue and name, the most first. A worker that told no names is believed to know all.
with living as materialized (
    select w.id, w.queues, {schema}.object_of(w.metadata) -> 'tasks' as names
    from {schema}.workers w
    join {schema}.supervisors s on s.id = w.supervisor_id
    where w.ended_at is null and s.ended_at is null and not s.draining
      and greatest(s.last_beat_at, w.last_beat_at) > statement_timestamp() - greatest(%(stale_ms)s, s.claimed_stale_ms) * interval '1 millisecond'
      and s.id <> all (array(select x.id from {schema}.trees_without_session() x))
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
