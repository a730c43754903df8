-- Write all changed pages to disk now, so that the server does not write them during a measurement.
checkpoint
