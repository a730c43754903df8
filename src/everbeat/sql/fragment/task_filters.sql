-- The filters of `everbeat tasks` that no index serves. A worker matches if it holds or has held the task, or if it ran one of the task's attempts. The
-- attempts are looked up for each task: with `exists`, the planner could read the whole table of attempts. An error can
-- be given as a code, a class, or a class without its module. An error is read only if its text has a string with this end, or an escaped
-- character. The offset keeps the planner from reading it three times. The virtual states are those of `VirtualState` (domain/task/states.py). With them, `states`
-- contains all states that such tasks can have. `plain_states` contains the states that match as they are. inspect/list_labelled_tasks finds labels with a value by an index.
(%(states)s::text[] is null or t.state = any(%(states)s::text[]))
  and (%(name)s::text is null or t.name = %(name)s)
  and (%(queue)s::text is null or t.queue = %(queue)s)
  and (%(key)s::text is null or t.key = %(key)s or t.unique_key = %(key)s)
  and (%(error)s::text is null or (t.error is not null and (%(error)s::text ~ '[^A-Za-z0-9_.]' or position(%(error)s::text || '"' in t.error::text) > 0 or position(E'\\u' in t.error::text) > 0) and (
      select e.error ->> 'code' = %(error)s or e.error ->> 'type' = %(error)s or right(e.error ->> 'type', length(%(error)s) + 1) = '.' || %(error)s
      from (select {schema}.object_of(t.error) as error offset 0) e
  )))
  and (%(worker)s::text is null or t.claimed_by_worker_id = %(worker)s or ((t.attempt > 1 or t.state = 'PENDING') and (
      (select true from {schema}.attempts a where a.task_id = t.id and a.worker_id = %(worker)s limit 1)
      or exists (select from unnest(t.attempts) a where a.worker_id = %(worker)s)
  )))
  and (%(since)s::timestamptz is null or event.at >= %(since)s)
  and (%(within_ms)s::bigint is null or event.at >= statement_timestamp() - %(within_ms)s * interval '1 millisecond')
  and (%(until)s::timestamptz is null or event.at < %(until)s)
  and (%(before_ms)s::bigint is null or event.at < statement_timestamp() - %(before_ms)s * interval '1 millisecond')
  and (
      %(virtual_states)s::text[] is null or t.state = any(%(plain_states)s::text[])
      or t.state = 'PENDING' and (
          'retrying' = any(%(virtual_states)s::text[]) and t.next_retry_at is not null
          or 'scheduled' = any(%(virtual_states)s::text[]) and t.enqueued_at > statement_timestamp() and t.next_retry_at is null and t.wake_at is null
          or 'suspended' = any(%(virtual_states)s::text[]) and t.enqueued_at > statement_timestamp() and t.wake_at > statement_timestamp()
          or 'overdue' = any(%(virtual_states)s::text[]) and t.enqueued_at < statement_timestamp() - %(overdue_ms)s::bigint * interval '1 millisecond'
      )
      or 'suspect' = any(%(virtual_states)s::text[]) and t.suspect and t.state in ('PENDING', 'CLAIMED', 'RUNNING')
  )
  and (%(labels)s::text is null or t.labels @> %(labels)s::text::jsonb)
  and (%(label_keys)s::text[] is null or t.labels ?& %(label_keys)s::text[])
  and (%(arguments_contain)s::text is null or position(%(arguments_contain)s::text in t.args::text) > 0)
