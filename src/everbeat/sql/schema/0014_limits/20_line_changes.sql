-- Changes that are not in `lines` and `gates` yet. A statement that sends, ends or changes a task only adds a row here. So it
-- waits for no limit, and no limit waits for it. `freed`: the permits of these gates were released. `at`: a task at this place of the line is PENDING.
-- `closed_until`: these gates were closed until then, in seconds since 1970. `xid` shows which rows might still appear before a given row.
create table {schema}.line_changes (
    xid           xid8 not null default pg_current_xact_id(),
    line          text,
    gates         text[],
    costs         integer[],
    freed         boolean not null default false,
    at            timestamptz,
    closed_until  double precision
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000, autovacuum_vacuum_insert_threshold = -1)
