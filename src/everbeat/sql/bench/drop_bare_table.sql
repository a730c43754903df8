-- Drop the minimal queue table (bench_rows).
drop table {schema}.bench_rows
