-- List a page of leases for an operator's sweep. The holder of each lease has ended, or has been silent for longer than the threshold by
-- the database's clock. Leases are listed oldest first, starting after the last lease of the previous page. Automatic recovery uses the
-- observer's own clock instead.
select {fragment/lease_columns}
from {schema}.leases l
where (l.silent_ms >= %(silent_ms)s or l.ended_at is not null) and (%(after_id)s::uuid is null or (l.claimed_at, l.id) > (%(after_at)s::timestamptz, %(after_id)s::uuid))
order by l.claimed_at, l.id limit %(limit)s
