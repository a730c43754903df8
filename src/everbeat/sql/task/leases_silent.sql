-- The leases whose holder has ended, or has been silent for so long by the database's clock, oldest first, after the last one of
-- the page before: for an operator's sweep. The reaper judges by its own clock instead.
select * from {schema}.leases l
where (l.silent_ms >= %(silent_ms)s or l.ended_at is not null) and (%(after_id)s::uuid is null or (l.claimed_at, l.id) > (%(after_at)s::timestamptz, %(after_id)s::uuid))
order by l.claimed_at, l.id limit %(limit)s
