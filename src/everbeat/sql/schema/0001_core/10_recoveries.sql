-- One row per recovery: the dead worker, the cause, how and how fast the death was noticed, and the action on the task.
create table {schema}.recoveries (
    id               bigint generated always as identity primary key,
    task_id          uuid not null,
    name             text not null,
    queue            text not null,
    fence            bigint not null,
    claim_id         uuid not null,
    attempt          integer not null,
    worker_id        text not null,
    supervisor_id    text,
    hostname         text,
    pid              integer,
    was              text not null,
    cause            text not null,
    noticed_by       text not null,
    last_beat_at     timestamptz,
    noticed_at       timestamptz not null default statement_timestamp(),
    noticed_after_ms bigint,
    action           text not null,
    next_retry_at    timestamptz,
    recovered_by     text,
    certificate      json
)
