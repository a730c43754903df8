-- Drop the schema with all its objects, for temporary schemas.
drop schema if exists {schema} cascade
