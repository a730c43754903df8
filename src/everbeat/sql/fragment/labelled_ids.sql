-- The ids of the tasks and workflows with a label, newest first: a scan of the primary key of `labels`. Rows are compared as a whole. If the key and
-- value were compared alone, the planner would underestimate the rows of frequent labels, and read and sort all of them.
    select l.key, l.value, l.id from {schema}.labels l
    where (l.key, l.value, l.id) >= (%(label)s::text, %(label_value)s::text, %(first_id)s::uuid)
      and (l.key, l.value, l.id) <= (%(label)s::text, %(label_value)s::text, %(last_id)s::uuid)
    order by l.key desc, l.value desc, l.id desc
