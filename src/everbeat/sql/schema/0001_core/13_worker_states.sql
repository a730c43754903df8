-- Snapshots of a worker's activity.
create table {schema}.worker_states (
    id             bigint generated always as identity primary key,
    worker_id      text not null,
    at             timestamptz not null default statement_timestamp(),
    tasks_running  integer not null,
    tasks_claimed  integer not null,
    slots          integer not null,
    rss_bytes      bigint not null,
    cpu_percent    real not null,
    loop_lag_ms    real not null
)
