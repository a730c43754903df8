-- Old ticks, for retention.
create index {concurrently} ticks_decided on {schema}.ticks (decided_at)
