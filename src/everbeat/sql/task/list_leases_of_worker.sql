-- List a page of the leases of one worker, oldest first, starting after the last lease of the previous page.
select {fragment/lease_columns}
from {schema}.leases l
where l.worker_id = %(worker_id)s
  and (%(after_id)s::uuid is null or (l.claimed_at, l.id) > (%(after_at)s::timestamptz, %(after_id)s::uuid))
order by l.claimed_at, l.id limit %(limit)s
