-- The schedules that one version of an app's code declares. `live_since`: when the first of the workers that now declare it was registered.
create table {schema}.schedule_versions (
    owner        text not null,
    version      text not null,
    schedules    json not null,
    live_since   timestamptz not null,
    primary key (owner, version)
)
