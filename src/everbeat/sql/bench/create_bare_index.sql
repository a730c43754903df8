-- Create the index that the claims of drain_bare_rows use.
create index on {schema}.bench_rows (queue, at, id) where state = 'PENDING'
