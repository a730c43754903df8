-- Sums of `rates` over all task functions, so that a chart of 30 days reads some hundred rows. `seconds` is the length of the span that
-- begins at `at`. A span has one row for each queue, and one for all queues (`is_total`, with an empty queue), which exists also if nothing
-- happened. A span is summed once, at least ten minutes after its end. `rates` keeps its rows, so the sums can be made again.
create table {schema}.rate_sums (
    seconds     integer not null constraint rate_sums_seconds check (seconds in (60, 300, 3600, 43200)),
    is_total    boolean not null,
    at          timestamptz not null,
    queue       text not null,
    started     bigint not null,
    completed   bigint not null,
    failed      bigint not null,
    retried     bigint not null,
    cancelled   bigint not null,
    suspended   bigint not null,
    released    bigint not null,
    crashed     bigint not null,
    lost        bigint not null,
    expired     bigint not null,
    wait_s      float8 not null,
    run_s       float8 not null,
    waits       bigint[] not null,
    runs        bigint[] not null,
    primary key (seconds, is_total, at, queue)
) with (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 10000)
