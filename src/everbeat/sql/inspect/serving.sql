-- How many workers are alive (a beat is younger than stale_ms), serve this queue, and know this task's name as well.
-- A worker that told no names is believed to know all.
select
    count(*) as alive,
    count(*) filter (where serves.queue) as serving,
    count(*) filter (where serves.queue and serves.name) as knowing
from {schema}.workers w
join {schema}.supervisors s on s.id = w.supervisor_id
cross join lateral (
    select
        w.queues is null or %(queue)s = any(w.queues) as queue,
        coalesce(w.metadata::jsonb -> 'tasks' ? %(name)s, true) as name
) serves
where w.ended_at is null and s.ended_at is null and not s.draining
  and greatest(s.last_beat_at, w.last_beat_at) > statement_timestamp() - %(stale_ms)s * interval '1 millisecond'
