-- One row with a random id, which distinguishes this schema from a schema with the same name in another database.
create table {schema}.installation (
    one  boolean primary key default true
        constraint installation_one check (one),
    id   uuid not null default gen_random_uuid()
)
