-- Records that a step of an upgrade was done.
insert into {schema}.schema_steps (version, name) values (%(version)s, %(name)s)
