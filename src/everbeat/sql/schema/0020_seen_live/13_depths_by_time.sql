-- The samples of a time, the last sample, and retention.
create index {concurrently} depths_by_time on {schema}.depths (seconds, at)
