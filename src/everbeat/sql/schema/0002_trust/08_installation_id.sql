-- Create the random id.
insert into {schema}.installation default values
