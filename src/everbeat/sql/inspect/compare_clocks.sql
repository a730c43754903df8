-- Return the database's clock, and the supervisors whose last heartbeat is ahead of it. A heartbeat is ahead if the clock was set back or
-- if this is another server.
select
    clock_timestamp() as now,
    array(
        select s.id from {schema}.supervisors s where s.ended_at is null and {schema}.plausible(s.last_beat_at) > clock_timestamp() order by s.id limit 10
    ) as ahead,
    coalesce((
        select extract(epoch from max({schema}.plausible(s.last_beat_at)) - clock_timestamp()) from {schema}.supervisors s where s.ended_at is null
    ), 0)::float8 as ahead_s
