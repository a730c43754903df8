-- A schedule: a rule that sends a task repeatedly. `task` to `serial` are stored as they are stored with a task, so no supervisor needs the
-- user's code. `timing` is the rule itself. All ticks up to `decided_to` are decided. A scheduler must read the row at `next_at`; null: never
-- again. Ticks up to `held_until` are not sent, because the schedule was paused or retired (`held_because`) at their moments.
-- `owner`: the app whose code declares the schedule; null: it was made at run time. `declaration` is the hash of the definition.
-- `changed_at` increases with each change of the row other than a decision about ticks.
create table {schema}.schedules (
    name                  text primary key,
    task                  text not null,
    args                  json not null,
    queue                 text not null,
    priority              smallint not null,
    key                   text,
    policy                json,
    flags                 json,
    serial                text,
    expires_ms            bigint,
    timing                json not null,
    timezone              text not null,
    starts_at             timestamptz,
    ends_at               timestamptz,
    most_runs             integer,
    missed                text not null constraint schedules_missed check (missed in ('latest', 'all', 'skip')),
    most                  integer not null,
    catchup_ms            bigint not null,
    overlap               text not null
        constraint schedules_overlap check (overlap in ('allow', 'skip', 'buffer_one', 'buffer_all', 'cancel_other')),
    jitter_ms             bigint not null,
    pause_after_failures  integer,
    note                  text,
    owner                 text,
    declaration           text,
    created_at            timestamptz not null default statement_timestamp(),
    changed_at            timestamptz not null default statement_timestamp(),
    decided_to            timestamptz not null default statement_timestamp(),
    next_at               timestamptz,
    runs                  integer not null default 0,
    paused_at             timestamptz,
    paused_by             text,
    pause_reason          text,
    resume_at             timestamptz,
    retired_at            timestamptz,
    retired_because       text,
    ended_at              timestamptz,
    held_until            timestamptz,
    held_because          text
)
