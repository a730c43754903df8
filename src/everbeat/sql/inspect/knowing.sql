-- The parameters that live workers registered for these task functions, with their queues and ids. A worker that told no names is believed
-- to know all. Workers that registered the same, as those of one version do, are looked through once. At most 10,000 rows.
with living as materialized (
    select w.id, w.queues, {schema}.object_of(w.metadata) as metadata
    from {schema}.workers w
    join {schema}.supervisors s on s.id = w.supervisor_id
    where w.ended_at is null and s.ended_at is null and not s.draining
      and greatest(s.last_beat_at, w.last_beat_at) > statement_timestamp() - greatest(%(stale_ms)s, s.claimed_stale_ms) * interval '1 millisecond'
      and s.id <> all (array(select x.id from {schema}.trees_without_session() x))
), alike as materialized (
    select l.queues, l.metadata -> 'tasks' as tasks, l.metadata -> 'parameters' as parameters, array_agg(l.id order by l.id) as workers
    from living l
    group by 1, 2, 3
)
select n.name, a.queues, (a.parameters -> n.name)::text as parameters, a.workers
from alike a
cross join unnest(%(names)s::text[]) n (name)
where coalesce(a.tasks ? n.name, true)
order by n.name, a.workers
limit 10000
