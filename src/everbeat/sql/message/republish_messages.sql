-- Mark messages that are missing from the stream for republication if their tasks are still waiting. Return these tasks.
update {schema}.message_outbox o
set place = null, published_at = null
from unnest(%(ids)s::bigint[], %(places)s::bigint[]) as m (id, place)
where o.id = m.id and o.place = m.place
  and exists (select from {schema}.tasks t where t.id = o.task_id and t.state = 'PENDING' and t.fence = o.fence)
returning o.task_id
