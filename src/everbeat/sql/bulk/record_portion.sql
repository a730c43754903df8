-- Record one portion of a bulk action, in the transaction that acted. If the action ends with it, note the end in the audit log.
with recorded as (
    update {schema}.bulk_actions b
    set state = %(state)s, started_at = coalesce(b.started_at, statement_timestamp()), changed_at = statement_timestamp(),
        ended_at = case when %(state)s not in ('PENDING', 'RUNNING') then statement_timestamp() end,
        next_at = statement_timestamp() + %(rest_ms)s::bigint * interval '1 millisecond', carried_out_by = %(by)s, position = %(position)s,
        is_walked = %(is_walked)s, locked = %(locked)s::text::uuid[], families = %(families)s::text::uuid[], examined = %(examined)s,
        matched = %(matched)s, done = %(done)s, skipped = %(skipped)s, reasons = %(reasons)s::text::json, examples = %(examples)s::text::json,
        portion = %(portion)s, failures = 0, waits = %(waits)s, problem = %(problem)s
    where b.id = %(id)s and b.ended_at is null
    returning b.id, b.action, b.state, b.filters, b.requested_by, b.origin, b.done, b.skipped, b.cancelled_by, b.ended_at, b.problem
), noted as (
    insert into {schema}.audit_log (actor, origin, action, target, filters, affected, outcome, note)
    select
        coalesce(r.cancelled_by, r.requested_by), r.origin, r.action || '_all', r.id::text, r.filters, r.done, lower(r.state),
        coalesce(r.problem, case when r.skipped > 0 then r.skipped || ' skipped' end)
    from recorded r where r.ended_at is not null
)
select r.id from recorded r
