-- The newest version of the schema that the code of a tree knows. Null for trees whose code is older than version 17.
alter table {schema}.supervisors add column code integer
