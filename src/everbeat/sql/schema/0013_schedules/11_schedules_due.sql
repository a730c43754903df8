-- Schedulers find due schedules here.
create index schedules_due on {schema}.schedules (next_at) where next_at is not null
