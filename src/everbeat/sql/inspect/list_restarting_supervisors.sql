-- List live supervisors that have fewer worker processes than configured and are able to start more, so that new workers will follow. If a
-- task id is given, list only supervisors whose last worker served the task's queue and knew its name. Supervisors that have not had a
-- worker yet are also listed.
with mine as materialized (
    select t.queue, t.name from {schema}.tasks t where t.id = %(task_id)s::uuid
)
select s.id, s.pid, s.hostname
from {schema}.supervisors s
where s.ended_at is null and not s.draining and s.start_problem is null
  and s.last_beat_at > statement_timestamp() - greatest(%(stale_ms)s, s.claimed_stale_ms) * interval '1 millisecond'
  and s.id <> all (array(select x.id from {schema}.trees_without_session() x))
  and s.processes > (select count(*) from {schema}.workers w where w.supervisor_id = s.id and w.ended_at is null)
  and coalesce((
      select (w.queues is null or mine.queue = any(w.queues)) and coalesce({schema}.object_of(w.metadata) -> 'tasks' ? mine.name, true)
      from {schema}.workers w
      cross join mine
      where w.supervisor_id = s.id
      order by w.started_at desc, w.id desc
      limit 1
  ), true)
order by s.started_at, s.id
limit 100
