-- Snapshots of workers, newest first.
select x.worker_id, x.at, x.tasks_running, x.tasks_claimed, x.slots, x.rss_bytes, x.cpu_percent, x.loop_lag_ms,
    x.messages::text
from {schema}.worker_states x
where (%(worker_id)s::text is null or x.worker_id = %(worker_id)s)
order by x.at desc, x.id desc
limit %(limit)s
