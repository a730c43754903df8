-- The items that tasks emit: numbered from 1 for each stream (task and name), across all attempts. `attempt` is the attempt that emitted the
-- item. The rows stay here when their task moves to `history`. Retention deletes them with the task.
create table {schema}.stream_items (
    task_id  uuid not null,
    name     text not null,
    number   integer not null,
    attempt  integer not null,
    value    json not null,
    at       timestamptz not null default statement_timestamp(),
    primary key (task_id, name, number)
)
