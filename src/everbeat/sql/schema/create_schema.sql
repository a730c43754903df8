-- Create the schema.
create schema if not exists {schema}
