-- Leases that automatic recovery should have recovered more than `margin_ms` ago: `overdue_ms` is positive. The lease's holder was silent
-- for longer than the threshold, or its worker has ended. A null threshold excludes leases in the corresponding state. Leases for which a
-- recovery hook returned Skip are also left out.
select
    l.id, l.ended_at,
    case when l.ended_at is not null then (extract(epoch from statement_timestamp() - coalesce({schema}.plausible(l.ended_at), statement_timestamp())) * 1000)::bigint
         else l.silent_ms - allowed.threshold_ms end - %(margin_ms)s as overdue_ms
from {schema}.leases l
cross join lateral (
    select
        case
            when l.state = 'RUNNING' and %(running_ms)s::bigint is not null then greatest(%(running_ms)s::bigint, l.running_stale_ms)
            when l.state = 'CLAIMED' and %(claimed_ms)s::bigint is not null then greatest(%(claimed_ms)s::bigint, l.claimed_stale_ms)
        end
        * case when exists (
            select from jsonb_each_text({schema}.object_of(l.flags::json)) flag where flag.key = any(%(resilient_flags)s::text[]) and flag.value = 'true'
        ) then %(multiplier)s else 1 end as threshold_ms
) allowed
where (l.ended_at is not null or l.silent_ms > %(margin_ms)s)
  and allowed.threshold_ms is not null
  -- A join would let the planner read the whole table of tasks.
  and (select t.left_claim_id = l.claim_id from {schema}.tasks t where t.id = l.id) is not true
