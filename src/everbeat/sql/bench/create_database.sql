-- A database for another queue; its name stands where a schema's stands elsewhere.
create database {schema} template template0
