-- Announce hints after the sends to which they belong were committed. A hint that tasks are ready (t:) is sent only if a worker listens. The
-- sends are visible by now, so a worker that starts to listen later finds them when it polls. PostgreSQL lets only one transaction that
-- notifies commit at a time, so this one must not wait for the disk while others wait for it. A lost hint costs no more than one poll. The
-- statement also must not wait long for its own turn, because the caller of a send waits for it.
select
    count(set_config('synchronous_commit', 'off', true)), count(set_config('lock_timeout', '250ms', true)), count(pg_notify(%(channel)s, h.hint))
from unnest(%(hints)s::text::text[]) as h (hint)
where (left(h.hint, 2) <> 't:' or exists (select from {schema}.workers w where w.listens and w.ended_at is null))
  and (select pg_notification_queue_usage()) < 0.5
