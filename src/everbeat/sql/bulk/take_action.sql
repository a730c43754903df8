-- Lock the bulk action whose next portion is due, until the end of the transaction. Actions that another supervisor is carrying out are skipped.
-- This version might not know the kind or a filter of an action. Such an action is left to newer code, because this version would act on
-- other tasks. A change in the future means that the clock was set back since, so the rest is over.
select
    b.id, b.action, b.filters::text, b.parameters::text, b.requested_by, b.origin, b.requested_at, b.cancel_requested_at is not null,
    b.cancelled_by, b.position, b.is_walked, b.locked, b.families, b.examined, b.matched, b.done, b.skipped, b.reasons::text, b.examples::text,
    b.portion, b.failures, b.waits, b.problem
from {schema}.bulk_actions b
where b.ended_at is null and (b.next_at <= statement_timestamp() or b.changed_at > statement_timestamp()) and b.action = any(%(actions)s::text[])
  and not exists (select from json_object_keys(b.filters) k (name) where k.name <> all(%(filters)s::text[]))
order by b.next_at, b.id
limit 1
for no key update skip locked
