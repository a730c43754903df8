-- List the queues that live workers serve, that are paused, or that have a limit, even if they have no task. A worker that serves all queues
-- registers no names. The tables of workers, pauses and limits are small.
select distinct known.name
from (
    select unnest(w.queues) as name
    {fragment/from_live_workers}
    union all
    select p.name from {schema}.pauses p where p.kind = 'queue'
    union all
    select substr(l.name, char_length(%(of_queue)s) + 1) from {schema}.limits l where starts_with(l.name, %(of_queue)s)
) known
where known.name is not null
order by known.name
limit 10000
