-- The version of the oldest code that works with the schema after this migration. Null for migrations up to 10, which did not record it.
alter table {schema}.schema_versions add column oldest_code integer
