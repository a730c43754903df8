-- The one row of the worker that publishes. `in_use`: messages were asked for once. `listens`: it has use for being told of a new row.
-- `failing`: the stream takes nothing, so that workers are to be told in its place. While nobody has held it for an hour, no rows
-- are written: messages are not in use, or not any more.
create table {schema}.relay (
    id           integer primary key default 1 constraint relay_one check (id = 1),
    in_use       boolean not null default false,
    holder       text,
    taken_until  timestamptz not null default '-infinity',
    listens      boolean not null default true,
    failing      boolean not null default false,
    channel      text not null default ''
) with (fillfactor = 50)
