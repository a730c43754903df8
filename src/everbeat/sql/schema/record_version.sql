-- Notes that a migration was applied, in its transaction.
insert into {schema}.schema_versions (version, name) values (%(version)s, %(name)s)
