-- The schema itself.
create schema if not exists {schema}
