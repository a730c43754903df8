-- Lock a workflow for a retry, and return whether it can be retried. FAILED and CANCELLED workflows can be retried, as can workflows that
-- paused by themselves. COMPLETED workflows can be retried only from a given node. A child can be retried only if it paused by itself. A
-- key has at most one live workflow.
select
    w.state, w.parent_id is not null as is_child, w.retry_call is not distinct from %(call)s::uuid as is_done, o.id as other,
    o.id is null and (
        w.state = 'PAUSED' and not w.is_held
        or w.parent_id is null and (w.state in ('FAILED', 'CANCELLED') or w.state = 'COMPLETED' and %(from_node)s::text is not null)
    ) as can
from {schema}.workflows w
left join lateral (
    select o.id from {schema}.workflows o
    where o.name = w.name and o.key = w.key and o.id <> w.id and o.state in ('RUNNING', 'PAUSED', 'CANCELLING')
    limit 1
) o on true
where w.id = %(id)s
for no key update of w
