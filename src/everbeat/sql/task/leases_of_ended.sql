-- The leases of ended workers, whoever they were, oldest first: every sweep revisits them.
select * from {schema}.leases l where l.ended_at is not null order by l.claimed_at, l.id limit %(limit)s
