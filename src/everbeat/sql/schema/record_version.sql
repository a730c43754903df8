-- In a migration's transaction, record that it was applied, and the version of the oldest code that works with the schema afterwards.
insert into {schema}.schema_versions (version, name, oldest_code) values (%(version)s, %(name)s, %(oldest_code)s)
