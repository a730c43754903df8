-- Schedulers find due schedules here.
create index {concurrently} schedules_due on {schema}.schedules (next_at) where next_at is not null
