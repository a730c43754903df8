-- Tells workers that take tasks of any queue that there are these.
select pg_notify(%(channel)s, 'o:::' || q.name) from unnest(%(queues)s::text[]) as q (name) where octet_length(q.name) < 7000
  and (select pg_notification_queue_usage()) < 0.5
