-- Delete all tasks, between two measurements.
truncate {schema}.tasks, {schema}.attempts, {schema}.recoveries, {schema}.labels
