-- The partitions of `history`: each contains the tasks that ended from `since` until just before `until`.
create table {schema}.history_parts (
    name   text primary key,
    since  timestamptz not null,
    until  timestamptz not null
)
