-- List the leases of these tasks.
select {fragment/lease_columns}
from {schema}.leases l
where l.id = any(%(ids)s::uuid[]) order by l.claimed_at, l.id
