-- Insert the row, which is never deleted.
insert into {schema}.relay default values
