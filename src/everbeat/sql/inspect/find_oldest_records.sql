-- Return the age in hours of the oldest record of each type: ended tasks, heartbeats and snapshots. Of the tasks, the 10,000 oldest are read.
-- A partition of `history` counts with its end.
select
    extract(epoch from statement_timestamp() - least((select min(p.until) from {schema}.history_parts p), (
        select min({schema}.plausible(coalesce(t.completed_at, t.failed_at, t.cancelled_at, t.expired_at)))
        from (select * from {schema}.tasks order by id limit 10000) t
        where t.state in ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED')
    )))::float8 / 3600 as terminal_hours,
    extract(epoch from statement_timestamp() - (
        select b.sent_at from {schema}.beats b
        where b.sent_at between '0002-01-01 00:00:00+00' and statement_timestamp() + interval '1 day' order by b.sent_at limit 1
    ))::float8 / 3600 as beat_hours,
    extract(epoch from statement_timestamp() - (
        select x.at from {schema}.worker_states x
        where x.at between '0002-01-01 00:00:00+00' and statement_timestamp() + interval '1 day' order by x.at limit 1
    ))::float8 / 3600 as state_hours
