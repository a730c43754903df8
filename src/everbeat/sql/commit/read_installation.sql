-- Return the id of this installation. The id distinguishes it from an installation with the same name elsewhere.
select i.id from {schema}.installation i
