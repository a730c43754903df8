-- Create the table of applied migrations, before the first of them.
create table if not exists {schema}.schema_versions (
    version     integer primary key,
    name        text not null,
    applied_at  timestamptz not null default statement_timestamp()
)
