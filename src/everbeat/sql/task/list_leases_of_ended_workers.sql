-- List a page of the leases of ended workers in these states, oldest first. Every sweep reads these leases again. If a supervisor saw the
-- process exit, the leases are left to that supervisor, because only it knows which tasks shared the process. The leases are left to that
-- supervisor until it has ended or the exit is older than owner_ms. Any supervisor can retry a lease that a hook left unchanged.
select {fragment/lease_columns}
from {schema}.leases l
where l.ended_at is not null and l.state = any(%(states)s::text[])
  and (%(after_id)s::uuid is null or (l.claimed_at, l.id) > (%(after_at)s::timestamptz, %(after_id)s::uuid))
  and (
      l.ended_how = 'child_exit'
      and l.ended_at > statement_timestamp() - %(owner_ms)s::bigint * interval '1 millisecond'
      and exists (select from {schema}.supervisors s where s.id = l.supervisor_id and s.ended_at is null)
      and not exists (select from {schema}.tasks t where t.id = l.id and t.left_claim_id = l.claim_id)
  ) is not true
order by l.claimed_at, l.id limit %(limit)s
