-- List the partitions of `history` whose tasks all ended more than `hours` ago, oldest first.
select p.name, p.since, p.until
from {schema}.history_parts p
where p.until <= statement_timestamp() - %(hours)s::integer * interval '1 hour'
order by p.since
