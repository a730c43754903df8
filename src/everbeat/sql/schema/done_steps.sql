-- The steps of a version that were done.
select name from {schema}.schema_steps where version = %(version)s
