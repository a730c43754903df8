-- The leases of ended workers in these states, whoever they were, oldest first: every sweep revisits them.
select * from {schema}.leases l
where l.ended_at is not null and l.state = any(%(states)s::text[])
order by l.claimed_at, l.id limit %(limit)s
