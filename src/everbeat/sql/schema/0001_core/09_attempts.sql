-- The history: one row per ended attempt, which never changes. A claim whose code never started leaves no row.
create table {schema}.attempts (
    task_id        uuid not null,
    attempt        integer not null,
    claim_id       uuid not null,
    fence          bigint not null,
    worker_id      text not null,
    claimed_at     timestamptz not null,
    started_at     timestamptz not null,
    ended_at       timestamptz not null default statement_timestamp(),
    outcome        text not null
        constraint attempts_outcome check (outcome in ('COMPLETED', 'FAILED', 'CANCELLED', 'RELEASED', 'CRASHED', 'LOST')),
    will_retry     boolean not null,
    error          json,
    primary key (task_id, attempt)
)
