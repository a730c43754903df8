-- Stores snapshots of workers.
insert into {schema}.worker_states (worker_id, tasks_running, tasks_claimed, slots, rss_bytes, cpu_percent, loop_lag_ms)
select * from unnest(
    %(worker_ids)s::text[], %(running)s::integer[], %(claimed)s::integer[], %(slots)s::integer[], %(rss_bytes)s::bigint[],
    %(cpu_percent)s::real[], %(loop_lag_ms)s::real[]
)
