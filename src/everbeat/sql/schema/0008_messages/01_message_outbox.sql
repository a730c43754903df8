-- What is to be told by messages: one row for each time a task became PENDING, written in the transaction that makes it so, while messages are
-- in use. `place` is where the stream keeps the message; null: to be published. Gone once the task is not PENDING any more.
create table {schema}.message_outbox (
    id            bigint generated always as identity primary key,
    task_id       uuid not null,
    queue         text not null,
    fence         bigint not null,
    due_at        timestamptz not null,
    times         integer not null default 0,
    place         bigint,
    published_at  timestamptz
) with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 2000, autovacuum_analyze_scale_factor = 0.05)
