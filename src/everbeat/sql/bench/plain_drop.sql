-- Nothing is left behind.
drop table {schema}.bench_plain
