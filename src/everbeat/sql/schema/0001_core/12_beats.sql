-- The recent history of heartbeats: one row per heartbeat of a supervisor, for any number of leases.
create table {schema}.beats (
    supervisor_id  text not null,
    seq            bigint not null,
    sent_at        timestamptz not null,
    held           integer not null,
    primary key (supervisor_id, seq)
)
