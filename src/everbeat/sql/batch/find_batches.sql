-- List the batches whose ids lie between two given ids, newest id first, without the batches of gathers.
select b.id, coalesce(b.name, ''), case when b.ended_at is not null then 'ENDED' when b.sealed_at is not null then 'SEALED' else 'OPEN' end as state
from {schema}.batches b
where b.id between %(first)s and %(last)s and b.waiter_id is null
order by b.id desc
limit %(limit)s
