-- The leases of one worker, oldest first.
select * from {schema}.leases l where l.worker_id = %(worker_id)s order by l.claimed_at, l.id limit %(limit)s
