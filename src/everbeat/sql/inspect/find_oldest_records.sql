-- Return the age in hours of the oldest record of each type: ended tasks (among the 10,000 oldest tasks), heartbeats and snapshots.
select
    extract(epoch from statement_timestamp() - (
        select min({schema}.plausible(coalesce(t.completed_at, t.failed_at, t.cancelled_at, t.expired_at)))
        from (select * from {schema}.tasks order by id limit 10000) t
        where t.state in ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED')
    ))::float8 / 3600 as terminal_hours,
    extract(epoch from statement_timestamp() - (select min({schema}.plausible(b.sent_at)) from {schema}.beats b))::float8 / 3600 as beat_hours,
    extract(epoch from statement_timestamp() - (select min({schema}.plausible(x.at)) from {schema}.worker_states x))::float8 / 3600 as state_hours
