-- The names of tasks and queues that live workers told: what a wrong one may have been meant for. A worker that serves all tells no queue.
with living as materialized (
    select {schema}.object_of(w.metadata) -> 'tasks' as tasks, w.queues
    from {schema}.workers w
    join {schema}.supervisors s on s.id = w.supervisor_id
    where w.ended_at is null and s.ended_at is null and not s.draining
      and greatest(s.last_beat_at, w.last_beat_at) > statement_timestamp() - greatest(%(stale_ms)s, s.claimed_stale_ms) * interval '1 millisecond'
      and s.id <> all (array(select x.id from {schema}.trees_without_session() x))
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
