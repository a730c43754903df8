-- Each task leaves two or three dead versions of its row. Vacuum removes them long before they make up a fifth of the table.
alter table {schema}.tasks set (
    autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000, autovacuum_analyze_scale_factor = 0.05
)
