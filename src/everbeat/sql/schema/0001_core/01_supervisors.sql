-- A supervisor: the process that starts and watches workers, sends heartbeats for them, and declares them dead.
-- A heartbeat changes only this row. No index covers the changed columns, so the update stays on the page.
create table {schema}.supervisors (
    id               text primary key,
    hostname         text not null,
    pid              integer not null,
    boot_id          text,
    pid_namespace    text,
    process_started  bigint,
    lock_key         bigint not null,
    session_name     text not null,
    session_at       timestamptz not null default statement_timestamp(),
    session_held     boolean not null default false,
    beat_seq         bigint not null default 0,
    last_beat_at     timestamptz not null default statement_timestamp(),
    started_at       timestamptz not null default statement_timestamp(),
    draining         boolean not null default false,
    ended_at         timestamptz,
    ended_how        text,
    metadata         json
) with (fillfactor = 50)
