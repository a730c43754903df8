-- Record that a portion of a bulk action failed, and make the next portion half as large, until one task is left. After too many failures, the
-- action ends as FAILED, and the audit log notes it.
with recorded as (
    update {schema}.bulk_actions b
    set portion = greatest(1, b.portion / 2), failures = b.failures + 1, problem = %(problem)s, changed_at = statement_timestamp(),
        next_at = statement_timestamp() + least(b.failures, 10) * interval '100 milliseconds', carried_out_by = %(by)s,
        started_at = coalesce(b.started_at, statement_timestamp()),
        state = case when b.failures + 1 >= %(most)s then 'FAILED' else 'RUNNING' end,
        ended_at = case when b.failures + 1 >= %(most)s then statement_timestamp() end
    where b.id = %(id)s and b.ended_at is null and b.failures = %(failures)s
    returning b.id, b.action, b.filters, b.requested_by, b.origin, b.done, b.ended_at, b.problem
), noted as (
    insert into {schema}.audit_log (actor, origin, action, target, filters, affected, outcome, note)
    select r.requested_by, r.origin, r.action || '_all', r.id::text, r.filters, r.done, 'failed', r.problem
    from recorded r where r.ended_at is not null
)
select r.id from recorded r
