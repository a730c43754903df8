-- Record that these rows were published, with their positions in the stream. A row that was deleted in the meantime stays deleted.
update {schema}.message_outbox o
set place = m.place, published_at = statement_timestamp(), times = o.times + 1
from unnest(%(ids)s::bigint[], %(places)s::bigint[]) as m (id, place)
where o.id = m.id and o.place is null
