insert into {schema}.relay default values
