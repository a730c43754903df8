-- A wait looks here for the first signal of its name.
create index signals_by_target on {schema}.signals (target, name, sent_at, id)
