-- The limits whose values an operator has replaced for a time.
create index {concurrently} limits_until on {schema}.limits (until) where until is not null
