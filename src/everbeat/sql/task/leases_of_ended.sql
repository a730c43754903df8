-- The leases of ended workers in these states, whoever they were, oldest first, after the last one of the page before: every sweep
-- revisits them.
select * from {schema}.leases l
where l.ended_at is not null and l.state = any(%(states)s::text[])
  and (%(after_id)s::uuid is null or (l.claimed_at, l.id) > (%(after_at)s::timestamptz, %(after_id)s::uuid))
order by l.claimed_at, l.id limit %(limit)s
