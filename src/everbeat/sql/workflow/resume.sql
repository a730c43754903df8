-- PAUSED -> RUNNING. What it holds of its children goes on when it is looked at, under its lock: a statement that read the tree here would
-- not see what is being paused at this moment.
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
