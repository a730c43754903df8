-- Rows that are not added up yet. The roll-up finds them without reading the sums of two days.
create index {concurrently} rates_by_supervisor on {schema}.rates (at) where supervisor <> ''
