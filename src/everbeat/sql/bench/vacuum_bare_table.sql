-- Vacuum the table and update its statistics, so that every measurement starts from the same state.
vacuum analyze {schema}.bench_rows
