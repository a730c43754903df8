-- One row, committed.
insert into {schema}.bench_plain (args) values (%(args)s)
