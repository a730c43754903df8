-- So that nothing of what was filled in is cleaned up during a measurement.
vacuum analyze {schema}.attempts
