-- Records that a migration was applied, in its transaction, and the version of the oldest code that works with the schema from then on.
insert into {schema}.schema_versions (version, name, oldest_code) values (%(version)s, %(name)s, %(oldest_code)s)
