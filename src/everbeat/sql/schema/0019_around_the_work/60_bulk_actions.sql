-- Bulk actions: each row is an order to act on all tasks that match its filters, and records how far it has come. `filters` are parameters of
-- the statements that find tasks, and `parameters` those of the action. `digest` is that of action, filters and parameters. `position` is the
-- last task id that the walk has decided on. `locked` are tasks that were locked when the walk passed them. `families` are cancelled tasks
-- whose children are still to be cancelled. `reasons` counts the skipped tasks by reason, and `examples` names the first of them. `portion` is
-- the size of the next portion, and `failures` the number of portions in a row that failed.
create table {schema}.bulk_actions (
    id                   uuid primary key,
    action               text not null,
    filters              json not null,
    parameters           json not null,
    digest               text not null,
    state                text not null default 'PENDING'
        constraint bulk_actions_state check (state in ('PENDING', 'RUNNING', 'COMPLETED', 'CANCELLED', 'FAILED')),
    requested_by         text not null,
    origin               text not null,
    requested_at         timestamptz not null default statement_timestamp(),
    started_at           timestamptz,
    cancel_requested_at  timestamptz,
    cancelled_by         text,
    ended_at             timestamptz,
    next_at              timestamptz not null default statement_timestamp(),
    changed_at           timestamptz not null default statement_timestamp(),
    carried_out_by       text,
    position             uuid not null default '00000000-0000-0000-0000-000000000000',
    is_walked            boolean not null default false,
    locked               uuid[] not null default array[]::uuid[],
    families             uuid[] not null default array[]::uuid[],
    examined             bigint not null default 0,
    matched              bigint not null default 0,
    done                 bigint not null default 0,
    skipped              bigint not null default 0,
    reasons              json not null default '{{}}',
    examples             json not null default '[]',
    portion              integer not null default 500,
    failures             integer not null default 0,
    waits                integer not null default 0,
    problem              text,
    constraint bulk_actions_end check ((ended_at is not null) = (state in ('COMPLETED', 'CANCELLED', 'FAILED')))
)
