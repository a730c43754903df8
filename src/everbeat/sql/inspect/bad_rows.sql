-- Rows with a value that everbeat never writes and cannot use, at most so many.
select b.relation, b.id, b.attribute, b.value from {schema}.bad_rows(%(most)s) b
