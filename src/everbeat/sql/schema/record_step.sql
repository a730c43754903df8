-- Record a finished step of an upgrade.
insert into {schema}.schema_steps (version, name) values (%(version)s, %(name)s)
