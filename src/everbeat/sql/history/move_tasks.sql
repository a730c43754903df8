-- Move ended tasks to `history`: one step of a scan of the primary key. `hours` is the retention, because older tasks are deleted instead of
-- moved. Return the position at which the next step begins (null: the end), how many tasks moved, and an end for which a partition is missing.
-- In that case, nothing moved.
select m.next_after, m.moved, m.lacks
from {schema}.move_to_history(
    %(after)s::uuid, %(until)s::uuid, %(limit)s::integer, %(age_ms)s::bigint * interval '1 millisecond',
    statement_timestamp() - %(hours)s::integer * interval '1 hour'
) m
