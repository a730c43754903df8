-- Return rows that contain a value which everbeat never writes and cannot use, up to a limit.
select b.relation, b.id, b.attribute, b.value from {schema}.bad_rows(%(most)s) b
