-- The gates of a limit that an older version of it has judged. It replaces gates_by_limit, which older code still uses.
create index {concurrently} gates_by_version on {schema}.gates (limit_name, version)
