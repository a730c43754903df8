-- So that nothing of what was filled in is written to disk during a measurement.
checkpoint
