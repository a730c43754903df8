-- Apply the noted changes of lines and gates, in a separate transaction. A repeated call applies what is left. `is_busy` says that
-- another worker is applying them at the moment.
select a.applied, a.is_busy
from {schema}.apply_line_changes(
    %(most)s, %(readers)s::text[], %(queues)s::text[], %(channel)s
) a
