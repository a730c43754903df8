-- Takes a workflow that is to be retried, and says whether it can be: FAILED and CANCELLED ones, PAUSED ones that paused by themselves, and
-- COMPLETED ones from a node on. A child is retried only where it paused by itself. One key has one that lives.
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
