-- What was said to a task, or to all tasks of a workflow; kept until its target is deleted. Who has got it stands in steps.
create table {schema}.signals (
    id       uuid primary key,
    target   uuid not null,
    name     text not null,
    value    json not null,
    sent_at  timestamptz not null default statement_timestamp()
)
