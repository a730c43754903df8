-- Return how many batches have been open for more than a day, and the first of them. The batches of gathers are sealed by their tasks.
select count(*) over () as number, b.id, b.name
from {schema}.batches b
where b.ended_at is null and b.sealed_at is null and b.waiter_id is null and b.created_at < statement_timestamp() - interval '1 day'
order by b.id
limit 1
