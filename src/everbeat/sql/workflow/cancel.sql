-- RUNNING | PAUSED -> CANCELLING: nothing more begins, what runs is asked to end, then it is CANCELLED. A terminal one stays as it is.
with cancelled as (
    update {schema}.workflows w
    set state = 'CANCELLING', cancel_requested_at = statement_timestamp()
    where w.id = %(id)s and w.state in ('RUNNING', 'PAUSED')
    returning w.id
), happened as (
    insert into {schema}.outbox (workflow_id, node) select c.id, null from cancelled c
)
select w.state as was, case when exists (select from cancelled) and (select pg_notification_queue_usage()) < 0.5 then pg_notify(%(channel)s, 'w') end
from {schema}.workflows w where w.id = %(id)s
