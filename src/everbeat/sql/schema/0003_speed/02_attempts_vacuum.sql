-- Rows are only inserted, and deleted by age. Vacuum removes dead rows in small batches.
alter table {schema}.attempts set (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_insert_scale_factor = 0.1)
