-- Request a bulk action, and note the request in the audit log: nothing -> PENDING. If an identical action has not ended, return that action
-- instead. The client's id makes the call idempotent. Return no row if an identical action ended or was requested at the same moment.
with requested as (
    insert into {schema}.bulk_actions as b (id, action, filters, parameters, digest, requested_by, origin)
    select %(id)s, %(action)s, %(filters)s::text::json, %(parameters)s::text::json, %(digest)s, %(by)s, %(origin)s
    where not exists (select from {schema}.bulk_actions b where b.id = %(id)s)
    on conflict (digest) where ended_at is null do nothing
    returning {fragment/bulk_fields}
), noted as (
    insert into {schema}.audit_log (actor, origin, action, target, filters, outcome, note)
    select r.requested_by, r.origin, r.action || '_all', r.id::text, r.filters::json, 'requested', %(note)s::text from requested r
)
select r.* from requested r
union all
select {fragment/bulk_fields}
from {schema}.bulk_actions b
where not exists (select from requested) and (b.id = %(id)s or b.digest = %(digest)s and b.ended_at is null)
order by 8
limit 1
