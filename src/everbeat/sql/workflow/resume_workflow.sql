-- Resume a workflow: PAUSED -> RUNNING. The workflow's children are resumed later, when the workflow is locked and checked. A statement
-- that read the tree here would not see a pause in progress.
with resumed as (
    update {schema}.workflows w
    set state = 'RUNNING', paused_at = null, is_held = false
    where w.id = %(id)s and w.state = 'PAUSED'
    returning w.id
), happened as (
    insert into {schema}.outbox (workflow_id, node) select r.id, null from resumed r
)
select w.state as was, case when exists (select from resumed) and (select pg_notification_queue_usage()) < 0.5 then pg_notify(%(channel)s, 'w') end
from {schema}.workflows w where w.id = %(id)s
