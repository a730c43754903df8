-- The leases under one supervisor, oldest first, after the last one of the page before.
select * from {schema}.leases l
where l.supervisor_id = %(supervisor_id)s
  and (%(after_id)s::uuid is null or (l.claimed_at, l.id) > (%(after_at)s::timestamptz, %(after_id)s::uuid))
order by l.claimed_at, l.id limit %(limit)s
