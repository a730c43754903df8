-- List supervisors whose whole tree has been silent for longer than the threshold by the database's clock, longest silence first. Each row
-- names the workers that would end with the supervisor, and the number of leases that each of them holds. The tree's own threshold applies
-- if it is longer and `exact` is not set.
select s.id, s.beat_seq, coalesce(tree.workers, '{{}}') as workers, tree.held
from {schema}.supervisors s
cross join lateral (
    select array_agg(w.id order by w.id) as workers, max(w.last_beat_at) as last_beat_at,
        json_object_agg(w.id, lease.held) filter (where lease.held > 0) as held
    from {schema}.workers w
    cross join lateral (
        select count(*) as held from {schema}.tasks t where t.claimed_by_worker_id = w.id and t.state in ('CLAIMED', 'RUNNING')
    ) lease
    where w.supervisor_id = s.id and w.ended_at is null
) tree
where s.ended_at is null
  and greatest(s.last_beat_at, tree.last_beat_at) <= statement_timestamp()
      - case when %(exact)s then %(silent_ms)s else greatest(%(silent_ms)s, s.claimed_stale_ms, s.running_stale_ms) end * interval '1 millisecond'
order by s.last_beat_at, s.id
