-- Insert one row in its own transaction.
insert into {schema}.bench_rows (args) values (%(args)s)
