-- What a task has done for good, and a re-run does not do again: steps that returned, sleeps, events it waited for, children it sent.
-- A wait is OPEN until a signal or its timeout ends it; everything else is DONE when it is written. due_at: until when it sleeps or waits.
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
