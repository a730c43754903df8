-- Cancel a task: PENDING | CLAIMED -> CANCELLED at once; for a RUNNING task, request a cancel and notify the holder. A terminal task stays
-- unchanged. A task in `history` has ended. A repeated call finds its id in the row that it cancelled, and returns the same result.
with held as materialized (
    select t.* from {schema}.tasks t where t.id = %(id)s for no key update
), ended as (
    update {schema}.tasks t
    set state = 'CANCELLED', cancelled_at = statement_timestamp(), cancel_requested_at = coalesce(t.cancel_requested_at, statement_timestamp()),
        claim_id = null, claim_call = %(call)s, next_retry_at = null,
        error = json_build_object(
            'code', 'TASK_CANCELLED',
            'message', case when h.attempt = 0 then 'cancelled before its code started' else 'cancelled before its code started again' end)
    from held h where t.id = h.id and h.state in ('PENDING', 'CLAIMED') and h.claim_call is distinct from %(call)s
    returning t.id, t.queue, t.serial, coalesce(t.workflow_id, t.batch_id) as whole_id
), asked as (
    update {schema}.tasks t
    set cancel_requested_at = coalesce(t.cancel_requested_at, statement_timestamp())
    from held h where t.id = h.id and h.state = 'RUNNING'
    returning t.id
)
select
    case when e.id is not null then 'CANCELLED' when a.id is not null then 'REQUESTED' else h.state end as verdict,
    h.state as was,
    (e.id is not null or h.claim_call = %(call)s) is true as by_this_call,
    case when e.id is not null and n.has_room then pg_notify(%(channel)s, 'd:' || h.id) end,
    case when e.whole_id is not null and n.has_room then pg_notify(%(channel)s, 'w') end,
    case when e.serial is not null and n.has_room then pg_notify(%(channel)s, 't:' || left(e.queue, 1000)) end,
    case when e.id is not null and h.state = 'CLAIMED' and n.has_room then pg_notify(%(channel)s, 'l:' || h.id) end,
    case when a.id is not null and n.has_room then pg_notify(%(channel)s, 'c:' || h.id) end
from held h
cross join (select pg_notification_queue_usage() < 0.5 as has_room) n
left join ended e on e.id = h.id
left join asked a on a.id = h.id
union all
select m.state, m.state, false, null, null, null, null, null
from {schema}.history m
where m.id = %(id)s and not exists (select from held)
