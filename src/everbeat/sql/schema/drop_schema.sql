-- The schema and everything in it, gone: for schemas that were made to be thrown away.
drop schema if exists {schema} cascade
