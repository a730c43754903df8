-- List live workers whose processes, according to their latest snapshots, had not responded to their supervisors for some time. The worker
-- that had been unresponsive for the longest time comes first.
select
    w.id, w.pid, w.hostname, latest.loop_lag_ms / 1000 as lag_s,
    greatest(0, extract(epoch from statement_timestamp() - latest.at))::float8 as snapshot_s,
    (select count(*) from {schema}.tasks t where t.claimed_by_worker_id = w.id and t.state in ('CLAIMED', 'RUNNING')) as held
from {schema}.workers w
join {schema}.supervisors s on s.id = w.supervisor_id
cross join lateral (
    select x.loop_lag_ms, x.at from {schema}.worker_states x where x.worker_id = w.id order by x.at desc limit 1
) latest
where w.ended_at is null and s.ended_at is null and latest.loop_lag_ms >= %(lag_ms)s
  and s.id <> all (array(select x.id from {schema}.trees_without_session() x))
order by latest.loop_lag_ms desc
limit 100
