-- The database of another queue goes, whoever is still connected to it.
drop database if exists {schema} with (force)
