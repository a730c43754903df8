-- Cancel a workflow: RUNNING | PAUSED -> CANCELLING. No more nodes start, and running tasks get a cancel request; once they have ended, the
-- workflow is CANCELLED. A terminal workflow stays unchanged.
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
