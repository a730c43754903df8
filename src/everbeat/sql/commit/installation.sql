-- The id of this installation: tells it from one of the same name elsewhere.
select i.id from {schema}.installation i
