-- List the parameters that live workers registered for the given task functions, with the workers' queues and ids. A worker that registered
-- no names is assumed to know all names. Identical registrations, such as those of workers of one version, are read once. At most 10,000
-- rows are returned.
with living as materialized (
    select w.id, w.queues, {schema}.object_of(w.metadata) as metadata
    {fragment/from_live_workers}
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
