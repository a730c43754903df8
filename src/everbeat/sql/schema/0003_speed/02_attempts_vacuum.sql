-- Rows are only added, and pruned by age: cleaned up in small portions.
alter table {schema}.attempts set (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_insert_scale_factor = 0.1)
