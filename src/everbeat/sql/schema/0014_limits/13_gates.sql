-- One row for each limit and key in use. `held` is the number of permits of leases plus those whose release is still in `line_changes`. So
-- it is never less than the number that is in use. `next_at` is the theoretical arrival time of the rate (GCRA). `recent` contains the latest
-- starts of a sliding window. The gate is closed until `closed_until`. These times are in seconds since 1970. The gate opens at `opens_at`
-- for the lines that wait for its rate. `reserved`: the first waiting line needs more permits than are free, so no other line can take any.
create table {schema}.gates (
    gate          text primary key,
    limit_name    text not null,
    held          integer not null default 0,
    next_at       double precision not null default 0,
    recent        double precision[],
    closed_until  double precision not null default 0,
    opens_at      timestamptz,
    reserved      boolean not null default false,
    used_at       timestamptz not null default statement_timestamp()
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000)
