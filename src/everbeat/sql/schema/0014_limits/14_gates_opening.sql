-- The gates that open by themselves.
create index {concurrently} gates_opening on {schema}.gates (opens_at) where opens_at is not null
