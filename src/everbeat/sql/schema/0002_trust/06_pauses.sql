-- What is not claimed for now: a task function or a queue, by an operator or by the brake.
create table {schema}.pauses (
    kind       text not null
        constraint pauses_kind check (kind in ('task', 'queue')),
    name       text not null,
    paused_at  timestamptz not null default statement_timestamp(),
    paused_by  text not null,
    reason     text,
    crashes    integer,
    primary key (kind, name)
)
