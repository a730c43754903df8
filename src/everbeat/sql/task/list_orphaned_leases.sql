-- List a page of the leases whose worker is not registered and whose age, by the database's clock, exceeds the smallest threshold. Leases
-- are listed oldest first, starting after the last lease of the previous page.
select {fragment/lease_columns}
from {schema}.leases l
where not exists (select from {schema}.workers w where w.id = l.worker_id) and l.silent_ms >= %(silent_ms)s
  and (%(after_id)s::uuid is null or (l.claimed_at, l.id) > (%(after_at)s::timestamptz, %(after_id)s::uuid))
order by l.claimed_at, l.id limit %(limit)s
