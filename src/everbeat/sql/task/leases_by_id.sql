-- The leases of these tasks.
select * from {schema}.leases l where l.id = any(%(ids)s::uuid[]) order by l.claimed_at, l.id
