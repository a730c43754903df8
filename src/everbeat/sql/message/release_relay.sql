-- Release the publishing turn at once, and notify the other workers.
with freed as (
    update {schema}.relay r set holder = null, taken_until = statement_timestamp(), listens = true where r.holder = %(holder)s returning r.channel
)
select pg_notify(f.channel, 'r') from freed f where (select pg_notification_queue_usage()) < 0.5
