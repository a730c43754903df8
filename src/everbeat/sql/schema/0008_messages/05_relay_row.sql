-- The row that is never deleted.
insert into {schema}.relay default values
