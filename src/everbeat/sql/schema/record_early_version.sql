-- Records that a migration up to 10 was applied, in its transaction: migration 11 makes the column of the oldest code.
insert into {schema}.schema_versions (version, name) values (%(version)s, %(name)s)
