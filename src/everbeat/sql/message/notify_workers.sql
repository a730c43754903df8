-- Notify workers of tasks in the given queues, because no worker receives the messages of these queues.
select pg_notify(%(channel)s, 't:' || q.name) from unnest(%(queues)s::text[]) as q (name) where octet_length(q.name) < 7000
  and (select pg_notification_queue_usage()) < 0.5
