-- Load rows with COPY.
copy {schema}.bench_rows (args) from stdin
