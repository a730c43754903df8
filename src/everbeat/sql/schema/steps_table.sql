-- Create the table of finished steps before the first step of an upgrade. Steps of a version that has not been applied belong to an upgrade
-- that is in progress or that stopped early. A new schema gets all versions at once and has no rows here.
create table if not exists {schema}.schema_steps (
    version  integer not null,
    name     text not null,
    done_at  timestamptz not null default statement_timestamp(),
    primary key (version, name)
)
