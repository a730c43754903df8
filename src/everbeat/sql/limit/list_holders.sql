-- Return the tasks that hold permits of some limits, each with its worker and the worker's last beat. Of each limit, the longest holders come first,
-- at most `limit` of them. tasks_leased finds the tasks.
with held as materialized (
    select
        split_part(u.gate, '/', 1) as limit_name, t.id, t.name, u.gate, coalesce(t.costs[u.place], 1) as cost, t.state, t.claimed_at, t.started_at,
        t.claimed_by_worker_id, row_number() over (partition by split_part(u.gate, '/', 1) order by t.claimed_at, t.id) as place
    from {schema}.tasks t
    cross join lateral unnest(t.gates) with ordinality as u (gate, place)
    where t.state in ('CLAIMED', 'RUNNING') and t.gates is not null and split_part(u.gate, '/', 1) = any(%(names)s::text[])
)
select
    h.limit_name, h.id, h.name, h.gate, h.cost, h.state, h.claimed_at, h.started_at, w.id as worker_id, w.hostname, w.pid,
    greatest(s.last_beat_at, w.last_beat_at) as last_beat_at
from held h
left join {schema}.workers w on w.id = h.claimed_by_worker_id
left join {schema}.supervisors s on s.id = w.supervisor_id
where h.place <= %(limit)s
order by h.limit_name, h.place
