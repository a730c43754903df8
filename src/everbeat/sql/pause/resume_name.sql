-- End one pause of a task function or a queue, and notify workers of the affected tasks. A repeated call does not end a later pause.
with resumed as (
    delete from {schema}.pauses p where p.kind = %(kind)s and p.name = %(name)s and p.paused_at = %(paused_at)s
    returning p.kind, p.name
)
select pg_notify(%(channel)s, case r.kind when 'queue' then 't:' || r.name else '*' end) from resumed r
where (select pg_notification_queue_usage()) < 0.5
