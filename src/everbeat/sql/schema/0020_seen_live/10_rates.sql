-- Events of tasks, counted by minute (`seconds` 60) or hour (3600). `at` is the beginning of that time. Each supervisor writes its own rows. A row
-- with an empty `supervisor` is the sum of all supervisors. `started` counts attempts whose code began, also after a sleep. An attempt ends as
-- `completed`, `failed`, `retried`, `cancelled`, `suspended` or `released`, and recovery ends it as `crashed` or `lost`. `expired` counts tasks
-- that expired before an attempt started. `waits` counts starts by the seconds since the task was due. `runs` counts ends by
-- the seconds since the start. Both have the 24 classes of domain/series.py. `wait_s` and `run_s` are the sums of these seconds.
create table {schema}.rates (
    seconds     integer not null constraint rates_seconds check (seconds in (60, 3600)),
    at          timestamptz not null,
    queue       text not null,
    name        text not null,
    supervisor  text not null,
    started     bigint not null default 0,
    completed   bigint not null default 0,
    failed      bigint not null default 0,
    retried     bigint not null default 0,
    cancelled   bigint not null default 0,
    suspended   bigint not null default 0,
    released    bigint not null default 0,
    crashed     bigint not null default 0,
    lost        bigint not null default 0,
    expired     bigint not null default 0,
    wait_s      float8 not null default 0,
    run_s       float8 not null default 0,
    waits       bigint[] not null default array_fill(0::bigint, array[24]) constraint rates_waits check (cardinality(waits) = 24),
    runs        bigint[] not null default array_fill(0::bigint, array[24]) constraint rates_runs check (cardinality(runs) = 24),
    primary key (seconds, at, queue, name, supervisor)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 10000)
