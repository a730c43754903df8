-- End the pause of everything, with the rows that it added for older code, and notify all workers. Other pauses of task functions and queues
-- remain. A repeated call does not end a later pause.
with resumed as (
    delete from {schema}.pauses p where p.kind = 'all' and p.paused_at = %(paused_at)s
    returning p.call
), also as (
    delete from {schema}.pauses p using resumed r where p.kind = 'task' and p.call = r.call
)
select pg_notify(%(channel)s, '*') from resumed r
where (select pg_notification_queue_usage()) < 0.5
