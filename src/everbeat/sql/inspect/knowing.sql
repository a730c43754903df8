-- The parameters that live workers registered for these task functions, with the queues and the ids of the workers that registered the
-- same. A worker that told no names is believed to know all. At most 10,000 groups.
with living as materialized (
    select w.id, w.queues, {schema}.object_of(w.metadata) as metadata
    from {schema}.workers w
    join {schema}.supervisors s on s.id = w.supervisor_id
    where w.ended_at is null and s.ended_at is null and not s.draining
      and greatest(s.last_beat_at, w.last_beat_at) > statement_timestamp() - %(stale_ms)s * interval '1 millisecond'
      and s.id <> all (array(select x.id from {schema}.trees_without_session() x))
)
select n.name, l.queues, (l.metadata -> 'parameters' -> n.name)::text as parameters, array_agg(l.id order by l.id) as workers
from living l
cross join unnest(%(names)s::text[]) n (name)
where coalesce(l.metadata -> 'tasks' ? n.name, true)
group by 1, 2, 3
order by 1, 2, 3
limit 10000
