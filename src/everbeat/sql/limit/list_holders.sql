-- Return the tasks that hold permits of a limit, longest first, each with its worker and the worker's last beat.
select
    t.id, t.name, u.gate, coalesce(t.costs[u.place], 1) as cost, t.state, t.claimed_at, t.started_at, w.id as worker_id, w.hostname, w.pid,
    greatest(s.last_beat_at, w.last_beat_at) as last_beat_at
from {schema}.tasks t
cross join lateral unnest(t.gates) with ordinality as u (gate, place)
left join {schema}.workers w on w.id = t.claimed_by_worker_id
left join {schema}.supervisors s on s.id = w.supervisor_id
where t.state in ('CLAIMED', 'RUNNING') and t.gates is not null
  and split_part(u.gate, '/', 1) = %(name)s::text
order by t.claimed_at, t.id
limit %(limit)s
