-- The recoveries of the last minute, for the brake; the oldest, for retention.
create index recoveries_by_time on {schema}.recoveries (noticed_at, name)
