-- The short history of beats: one row per supervisor per beat, whatever it holds.
create table {schema}.beats (
    supervisor_id  text not null,
    seq            bigint not null,
    sent_at        timestamptz not null,
    held           integer not null,
    primary key (supervisor_id, seq)
)
