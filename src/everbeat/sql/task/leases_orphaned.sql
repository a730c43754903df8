-- The leases whose worker is not registered, and that are older than the least threshold by the database's clock; oldest first, after
-- the last one of the page before.
select * from {schema}.leases l
where not exists (select from {schema}.workers w where w.id = l.worker_id) and l.silent_ms >= %(silent_ms)s
  and (%(after_id)s::uuid is null or (l.claimed_at, l.id) > (%(after_at)s::timestamptz, %(after_id)s::uuid))
order by l.claimed_at, l.id limit %(limit)s
