-- Request that a bulk action stops after its current portion, and note the request in the audit log. A repeated call changes nothing. Return the action.
with asked as (
    update {schema}.bulk_actions b
    set cancel_requested_at = statement_timestamp(), cancelled_by = %(by)s, next_at = least(b.next_at, statement_timestamp())
    where b.id = %(id)s and b.ended_at is null and b.cancel_requested_at is null
    returning {fragment/bulk_fields}
), noted as (
    insert into {schema}.audit_log (actor, origin, action, target, filters, affected, outcome)
    select %(by)s, %(origin)s, 'cancel_bulk_action', a.id::text, a.filters::json, a.done, 'requested' from asked a
)
select a.* from asked a
union all
select {fragment/bulk_fields} from {schema}.bulk_actions b where b.id = %(id)s and not exists (select from asked)
