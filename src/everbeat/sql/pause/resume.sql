-- Ends one pause of a task function or a queue, and hints at what may wait for that. Repeated, it leaves a later pause alone.
with resumed as (
    delete from {schema}.pauses p where p.kind = %(kind)s and p.name = %(name)s and p.paused_at = %(paused_at)s
    returning p.kind, p.name
)
select pg_notify(%(channel)s, case r.kind when 'queue' then 't:' || r.name else '*' end) from resumed r
where (select pg_notification_queue_usage()) < 0.5
