-- The steps that were done of each upgrade; made before the first of them. Steps of a version that is not applied are those of an upgrade
-- that is under way, or that ended before its last step. A schema that is created gets all versions at once and has no rows here.
create table if not exists {schema}.schema_steps (
    version  integer not null,
    name     text not null,
    done_at  timestamptz not null default statement_timestamp(),
    primary key (version, name)
)
