-- A table as narrow as a queue can be, for what the server does without everbeat.
create table {schema}.bench_plain (
    id        uuid primary key default gen_random_uuid(),
    queue     text not null default 'default',
    state     text not null default 'PENDING',
    args      text not null,
    at        timestamptz not null default clock_timestamp(),
    claim_id  uuid,
    done_at   timestamptz
) with (fillfactor = 85)
