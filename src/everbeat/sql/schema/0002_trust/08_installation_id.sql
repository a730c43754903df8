-- Draws the id.
insert into {schema}.installation default values
