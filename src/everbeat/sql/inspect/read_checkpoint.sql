-- Return the first `most` characters of a task's checkpoint, also of a task in `history`, and whether that is a part only. The primary keys
-- serve it.
select left(t.checkpoint::text, %(most)s) as checkpoint, length(t.checkpoint::text) > %(most)s as is_cut
from {schema}.all_tasks t
where t.id = %(id)s and t.checkpoint is not null
