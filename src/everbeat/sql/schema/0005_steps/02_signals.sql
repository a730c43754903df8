-- Signals to a task, or to all tasks of a workflow, kept until the target is deleted. The table of steps records which task received a
-- signal.
create table {schema}.signals (
    id       uuid primary key,
    target   uuid not null,
    name     text not null,
    value    json not null,
    sent_at  timestamptz not null default statement_timestamp()
)
