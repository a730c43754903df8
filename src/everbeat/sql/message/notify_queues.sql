-- Send a notification about the given queues to the workers that serve all queues.
select pg_notify(%(channel)s, 'o:::' || q.name) from unnest(%(queues)s::text[]) as q (name) where octet_length(q.name) < 7000
  and (select pg_notification_queue_usage()) < 0.5
