-- The largest counts of `depths` in spans of time, so that a chart reads one row for each of its points. `seconds` is the length of the span that
-- begins at `at`. A span has one row for each queue with live tasks, and one for all queues together (`is_total`, with an empty queue). Its
-- columns are null if no sample was taken. The counts of all queues at the time of a sample are added up first. `at_least`: counts
-- can be too low. A span is added once, ten minutes after its end. `depths` keeps its rows, so the peaks can be found again.
create table {schema}.depth_peaks (
    seconds       integer not null constraint depth_peaks_seconds check (seconds in (60, 300, 3600, 43200)),
    is_total      boolean not null,
    at            timestamptz not null,
    queue         text not null,
    due           bigint,
    scheduled     bigint,
    suspended     bigint,
    claimed       bigint,
    running       bigint,
    oldest_due_s  float8,
    at_least      boolean,
    primary key (seconds, is_total, at, queue)
) with (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 10000)
