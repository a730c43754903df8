-- List the latest snapshots of several workers, those of each worker newest first. worker_states_by_worker serves each of them.
select w.id, x.at, x.tasks_running, x.tasks_claimed, x.slots, x.rss_bytes, x.cpu_percent, x.loop_lag_ms
from unnest(%(worker_ids)s::text[]) as w (id)
cross join lateral (
    select o.id, o.at, o.tasks_running, o.tasks_claimed, o.slots, o.rss_bytes, o.cpu_percent, o.loop_lag_ms
    from {schema}.worker_states o
    where o.worker_id = w.id
    order by o.at desc
    limit %(each)s
) x
order by w.id, x.at desc, x.id desc
