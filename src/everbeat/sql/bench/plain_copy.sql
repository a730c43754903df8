-- As many rows as a client can write.
copy {schema}.bench_plain (args) from stdin
