-- Pause a workflow immediately: RUNNING -> PAUSED. The worker that advances the workflow withdraws tasks that have not begun. Child
-- workflows are paused as well.
with paused as (
    update {schema}.workflows w
    set state = 'PAUSED', paused_at = statement_timestamp()
    where w.id = %(id)s and w.state = 'RUNNING'
    returning w.id
), happened as (
    insert into {schema}.outbox (workflow_id, node) select p.id, null from paused p
)
select w.state as was, case when exists (select from paused) and (select pg_notification_queue_usage()) < 0.5 then pg_notify(%(channel)s, 'w') end
from {schema}.workflows w where w.id = %(id)s
