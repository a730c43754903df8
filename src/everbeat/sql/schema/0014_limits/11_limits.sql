-- A limit: at most `concurrency` permits at a time, and at most `starts` starts per `period_s` seconds, for each of its gates. A rate is
-- smoothed and permits `burst` starts at once; if `sliding` is set, no window of `period_s` contains more than `starts` starts. `declared`
-- contains the values that the code declares. The other columns contain the values in force, which an operator can replace until `until`.
create table {schema}.limits (
    name          text primary key,
    concurrency   integer
        constraint limits_concurrency check (concurrency >= 0),
    starts        integer
        constraint limits_starts check (starts > 0),
    period_s      double precision
        constraint limits_period check (period_s > 0),
    burst         integer not null default 1
        constraint limits_burst check (burst > 0),
    sliding       boolean not null default false,
    fair          boolean not null default false,
    weights       json not null default '{{}}',
    when_full     text not null default 'wait'
        constraint limits_when_full check (when_full in ('wait', 'drop', 'newest')),
    declared      json,
    declared_by   text,
    declared_at   timestamptz,
    set_by        text,
    set_at        timestamptz,
    reason        text,
    until         timestamptz,
    constraint limits_rate check ((starts is null) = (period_s is null))
)
