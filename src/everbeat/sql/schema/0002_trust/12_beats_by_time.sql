-- The oldest heartbeats, for retention.
create index beats_by_time on {schema}.beats (sent_at)
