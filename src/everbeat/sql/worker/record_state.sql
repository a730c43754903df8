-- Store snapshots of workers.
insert into {schema}.worker_states (worker_id, tasks_running, tasks_claimed, slots, rss_bytes, cpu_percent, loop_lag_ms, messages)
select s.worker_id, s.running, s.claimed, s.slots, s.rss_bytes, s.cpu_percent, s.loop_lag_ms, s.messages::json from unnest(
    %(worker_ids)s::text[], %(running)s::integer[], %(claimed)s::integer[], %(slots)s::integer[], %(rss_bytes)s::bigint[],
    %(cpu_percent)s::real[], %(loop_lag_ms)s::real[], %(messages)s::text[]
) as s (worker_id, running, claimed, slots, rss_bytes, cpu_percent, loop_lag_ms, messages)
