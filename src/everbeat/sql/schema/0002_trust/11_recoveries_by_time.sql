-- The recoveries of the last minute, for the crash circuit breaker, and the oldest recoveries, for retention.
create index recoveries_by_time on {schema}.recoveries (noticed_at, name)
