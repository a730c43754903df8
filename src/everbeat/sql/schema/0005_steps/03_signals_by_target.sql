-- A wait finds the first signal with its name here.
create index signals_by_target on {schema}.signals (target, name, sent_at, id)
