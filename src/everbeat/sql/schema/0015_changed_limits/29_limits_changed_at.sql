-- The limits that have changed lately.
create index {concurrently} limits_changed_at on {schema}.limits (changed_at)
