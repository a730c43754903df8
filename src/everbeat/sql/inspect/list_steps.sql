-- List the steps, sleeps, waits for events and children of a task, also of a task in `history`. The first one is at the beginning. Of a
-- long result, only the first `most` characters are read. The primary keys of `steps` and `history` serve it.
select s.kind, s.name, s.state, s.attempt, s.begun_at, s.recorded_at, s.due_at, left(s.result::text, %(most)s) as result,
    length(s.result::text) > %(most)s as is_cut
from (
    select s.kind, s.name, s.state, s.attempt, s.begun_at, s.recorded_at, s.due_at, s.result
    from {schema}.steps s
    where s.task_id = %(id)s
    union all
    select s.kind, s.name, s.state, s.attempt, s.begun_at, s.recorded_at, s.due_at, s.result
    from {schema}.history h
    cross join lateral unnest(h.steps) s
    where h.id = %(id)s
) s
order by s.begun_at, s.kind, s.name
limit %(limit)s
