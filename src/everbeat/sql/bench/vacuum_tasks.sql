-- Vacuum the tables and update their statistics, so that every measurement starts from the same state. Autovacuum then has no reason to run
-- during a measurement.
vacuum analyze {schema}.tasks, {schema}.attempts, {schema}.lines, {schema}.gates, {schema}.line_changes
