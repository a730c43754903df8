-- The message outbox: one row for each time that a task became PENDING, written in the same transaction while messages are in use. `place`
-- is the position of the message in the stream, or null if the message is still to be published. The row is deleted when the task leaves
-- the state PENDING.
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
