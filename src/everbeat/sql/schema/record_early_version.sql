-- In the transaction of a migration up to 10, record that it was applied. Migration 11 creates the column for the oldest code.
insert into {schema}.schema_versions (version, name) values (%(version)s, %(name)s)
