-- Paused task functions and queues, from which workers claim nothing. An operator or the crash circuit breaker paused them.
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
