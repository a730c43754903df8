-- List snapshots of workers, newest first. The pid is null if the worker's own row was deleted.
select x.worker_id, x.at, x.tasks_running, x.tasks_claimed, x.slots, x.rss_bytes, x.cpu_percent, x.loop_lag_ms,
    x.messages::text, w.pid
from {schema}.worker_states x
left join {schema}.workers w on w.id = x.worker_id
where (%(worker_id)s::text is null or x.worker_id = %(worker_id)s)
order by x.at desc, x.id desc
limit %(limit)s
