-- Between two measurements.
truncate {schema}.tasks, {schema}.attempts, {schema}.recoveries
