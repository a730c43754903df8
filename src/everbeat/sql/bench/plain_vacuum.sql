-- So that every measurement begins with the same statistics.
vacuum analyze {schema}.bench_plain
