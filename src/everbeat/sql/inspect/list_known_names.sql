-- List the names of tasks and queues that live workers have registered, to suggest a correction for a misspelled name. A worker that serves
-- all queues registers no queue names.
with living as materialized (
    select {schema}.object_of(w.metadata) -> 'tasks' as tasks, w.queues
    {fragment/from_live_workers}
)
select distinct told.kind, told.name
from living l
cross join lateral (
    select 'task' as kind, jsonb_array_elements_text(case when jsonb_typeof(l.tasks) = 'array' then l.tasks end) as name
    union all
    select 'queue', unnest(l.queues)
) told
order by told.kind, told.name
limit 10000
