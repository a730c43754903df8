-- If a retried task `a` ended because a wait timed out, forget the wait, so that it starts again.
delete from {schema}.steps s
using again a, held h
where s.task_id = a.id and h.id = a.id and h.error::text ~ '^[{{]"code": ?"EVENT_TIMEOUT"' and s.kind = 'event' and s.state = 'TIMED_OUT'
  and not exists (
      select from {schema}.steps later
      where later.task_id = s.task_id and later.kind = 'event' and later.state = 'TIMED_OUT' and later.recorded_at > s.recorded_at
  )
