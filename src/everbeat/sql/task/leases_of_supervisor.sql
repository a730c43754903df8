-- The leases under one supervisor, oldest first.
select * from {schema}.leases l where l.supervisor_id = %(supervisor_id)s order by l.claimed_at, l.id limit %(limit)s
