-- Old ticks, for retention.
create index ticks_decided on {schema}.ticks (decided_at)
