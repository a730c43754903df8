-- A decided tick of a schedule: SENT as task_id, or not sent (SKIPPED because of an overlap, MISSED) with its reason. A row with `last_at` is a
-- series of `missed` ticks from `at` to `last_at`; a null `missed` means that they were not counted.
create table {schema}.ticks (
    schedule    text not null,
    at          timestamptz not null,
    outcome     text not null constraint ticks_outcome check (outcome in ('SENT', 'SKIPPED', 'MISSED')),
    task_id     uuid,
    reason      text,
    detail      text,
    last_at     timestamptz,
    missed      bigint,
    decided_at  timestamptz not null default statement_timestamp(),
    decided_by  text,
    primary key (schedule, at),
    constraint ticks_task check ((task_id is not null) = (outcome = 'SENT'))
)
