-- The version of the oldest code that works with the schema once this migration is applied; null for the migrations up to 10, which said none.
alter table {schema}.schema_versions add column oldest_code integer
