-- The recorded steps of a task, which a later attempt does not repeat: results, sleeps, events and children.
-- A wait is OPEN until a signal or its timeout ends it; any other step is DONE as soon as it is written. due_at is the end of a sleep or a
-- wait.
create table {schema}.steps (
    task_id      uuid not null,
    kind         text not null
        constraint steps_kind check (kind in ('step', 'sleep', 'event', 'child')),
    name         text not null,
    state        text not null default 'DONE'
        constraint steps_state check (state in ('OPEN', 'DONE', 'TIMED_OUT')),
    result       json,
    due_at       timestamptz,
    signal_id    uuid,
    attempt      integer not null,
    begun_at     timestamptz not null default statement_timestamp(),
    recorded_at  timestamptz not null default statement_timestamp(),
    primary key (task_id, kind, name)
)
