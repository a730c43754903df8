-- PAUSED -> RUNNING, its children too.
with recursive tree as (
    select w.id, w.state from {schema}.workflows w where w.id = %(id)s
    union all
    select c.id, c.state from tree t join {schema}.workflows c on c.parent_id = t.id
), resumed as (
    update {schema}.workflows w
    set state = 'RUNNING', paused_at = null
    where w.id in (select t.id from tree t) and w.state = 'PAUSED' and (select t.state from tree t where t.id = %(id)s) = 'PAUSED'
    returning w.id
), happened as (
    insert into {schema}.outbox (workflow_id, node) select r.id, null from resumed r
)
select w.state as was, case when exists (select from resumed) then pg_notify(%(channel)s, 'w') end
from {schema}.workflows w where w.id = %(id)s
