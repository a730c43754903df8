-- The applied versions in order.
select version, name, applied_at from {schema}.schema_versions order by version
