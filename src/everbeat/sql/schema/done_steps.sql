-- List the finished steps of a version's upgrade.
select name from {schema}.schema_steps where version = %(version)s
