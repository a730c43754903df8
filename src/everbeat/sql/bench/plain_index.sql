-- What a claim walks.
create index on {schema}.bench_plain (queue, at, id) where state = 'PENDING'
