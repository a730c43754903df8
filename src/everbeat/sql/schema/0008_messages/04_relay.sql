-- The single row for the worker that publishes. `in_use`: messages have been enabled. `listens`: the worker wants to be notified of each
-- new row. `failing`: the stream rejects all messages, so senders notify the workers instead. If no worker has held the row for an hour,
-- messages are not in use, and no rows are written to the outbox.
create table {schema}.relay (
    id           integer primary key default 1 constraint relay_one check (id = 1),
    in_use       boolean not null default false,
    holder       text,
    taken_until  timestamptz not null default '-infinity',
    listens      boolean not null default true,
    failing      boolean not null default false,
    channel      text not null default ''
) with (fillfactor = 50)
