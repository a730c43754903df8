-- Create a queue table with as few columns as possible, to measure the server's own speed without everbeat.
create table {schema}.bench_rows (
    id        uuid primary key default gen_random_uuid(),
    queue     text not null default 'default',
    state     text not null default 'PENDING',
    args      text not null,
    at        timestamptz not null default clock_timestamp(),
    claim_id  uuid,
    done_at   timestamptz
) with (fillfactor = 85)
