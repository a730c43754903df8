-- A worker: one executing process. ended_at is final: a claim locks the row FOR KEY SHARE, and ending the worker locks it FOR UPDATE.
create table {schema}.workers (
    id               text primary key,
    supervisor_id    text not null references {schema}.supervisors (id),
    hostname         text not null,
    pid              integer not null,
    process_started  bigint,
    queues           text[],
    beat_seq         bigint not null default 0,
    last_beat_at     timestamptz,
    started_at       timestamptz not null default statement_timestamp(),
    ended_at         timestamptz,
    ended_how        text,
    ended_cause      text,
    exit_code        integer,
    signal           integer,
    metadata         json
) with (fillfactor = 70)
