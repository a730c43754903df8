-- List live supervisors that cannot start a worker process. The supervisor that has been failing for the longest time comes first. A tree
-- without a session in PostgreSQL is not live.
select
    s.id, s.pid, s.hostname, s.start_problem, {schema}.plausible(s.start_problem_at) as since, s.processes,
    (select count(*) from {schema}.workers w where w.supervisor_id = s.id and w.ended_at is null) as workers
from {schema}.supervisors s
where s.ended_at is null and s.start_problem is not null
  and s.last_beat_at > statement_timestamp() - greatest(%(stale_ms)s, s.claimed_stale_ms) * interval '1 millisecond'
  and s.id <> all (array(select x.id from {schema}.trees_without_session() x))
order by s.start_problem_at, s.id
limit 100
