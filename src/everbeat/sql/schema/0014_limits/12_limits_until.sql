-- The limits whose values an operator has replaced for a time.
create index limits_until on {schema}.limits (until) where until is not null
