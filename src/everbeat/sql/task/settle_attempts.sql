-- Settle attempts: RUNNING -> COMPLETED | FAILED | CANCELLED | PENDING (a retry, a release without charge, or suspended until wake_at).
-- Requires the current claim_id. An attempt that was already settled returns "already"; no row means a lost lease. A suspended task has
-- already started, so good_until no longer applies, and a signal can still change its wake_at. HANDED_BACK is a RELEASED whose code has
-- begun, so its good_until no longer applies either: the shutdown of its worker must not expire the task. A cancel request never hides a
-- success. After a cancel request, any other outcome becomes CANCELLED and never a retry. The parameters are JSON arrays, because quoting a
-- large result as an element of a text array takes minutes. All parameters are texts, so that any driver works if the code settles the
-- attempt in its own commit. Return one row with the verdicts, in the given order. A task whose code ended without a crash is no longer a
-- suspect. The end of a task releases the next task of its serial line. Without `limit 1`, the planner would move the condition on the
-- state into the lookup and read the whole index of leases for each row. Two lists are never joined: each row is looked up by its key.
with asked as (
    select
        a.id, a.claim_id, case a.outcome when 'HANDED_BACK' then 'RELEASED' else a.outcome end as outcome,
        a.outcome in ('HANDED_BACK', 'SUSPENDED') as has_begun, a.retry_in_ms, a.result, nullif(a.error::text, 'null')::json as error, a.place
    from rows from (
        unnest(
            %(ids)s::text::uuid[], %(claim_ids)s::text::uuid[], %(outcomes)s::text::text[], %(retry_in_ms)s::text::bigint[]
        ),
        json_array_elements(%(results)s::text::json), json_array_elements(%(errors)s::text::json)
    ) with ordinality as a (id, claim_id, outcome, retry_in_ms, result, error, place)
), held as materialized (
    select
        a.*, t.queue, t.fence, t.attempt, t.claimed_by_worker_id, t.claimed_at, t.started_at,
        statement_timestamp() + a.retry_in_ms * interval '1 millisecond' as retry_at,
        case
            when t.id is null then null
            when a.outcome = 'COMPLETED' then 'COMPLETED'
            when t.cancel_requested_at is not null or a.outcome = 'CANCELLED' then 'CANCELLED'
            when a.outcome in ('RELEASED', 'SUSPENDED') then 'PENDING'
            when a.retry_in_ms is not null
                 and (t.good_until is null or t.good_until > statement_timestamp() + a.retry_in_ms * interval '1 millisecond') then 'PENDING'
            else 'FAILED'
        end as next_state
    from asked a
    left join lateral (
        select * from (select * from {schema}.tasks t where t.id = a.id limit 1 for no key update) t
        where t.claim_id = a.claim_id and t.state = 'RUNNING'
    ) t on true
), settled as (
    update {schema}.tasks t
    set state = h.next_state,
        result = case when h.next_state = 'COMPLETED' then h.result end,
        error = case when h.next_state = 'COMPLETED' or h.outcome in ('RELEASED', 'SUSPENDED') then null
                     when h.next_state = 'CANCELLED'
                     then coalesce(h.error, json_build_object('code', 'TASK_CANCELLED', 'message', 'cancelled while running'))
                     else h.error end,
        completed_at = case when h.next_state = 'COMPLETED' then statement_timestamp() end,
        failed_at = case when h.next_state = 'FAILED' then statement_timestamp() end,
        cancelled_at = case when h.next_state = 'CANCELLED' then statement_timestamp() end,
        retry_count = least(t.retry_count::bigint + (h.next_state = 'PENDING' and h.outcome = 'FAILED')::integer, 2147483647)::integer,
        next_retry_at = case when h.next_state = 'PENDING' and h.outcome = 'FAILED' then h.retry_at end,
        enqueued_at = case
            when h.next_state = 'PENDING' and h.outcome = 'FAILED' then h.retry_at
            when h.next_state = 'PENDING' and h.outcome = 'SUSPENDED' then coalesce(t.wake_at, statement_timestamp())
            else t.enqueued_at
        end,
        good_until = case when h.next_state = 'PENDING' and h.has_begun then null else t.good_until end,
        waits_for = case when h.next_state = 'PENDING' and h.outcome = 'SUSPENDED' then t.waits_for end,
        wake_at = case when h.next_state = 'PENDING' and h.outcome = 'SUSPENDED' then t.wake_at end,
        claim_id = null, claim_call = null,
        claimed_at = case when h.next_state = 'PENDING' then null else t.claimed_at end,
        claimed_by_worker_id = case when h.next_state = 'PENDING' then null else t.claimed_by_worker_id end,
        started_at = case when h.next_state = 'PENDING' then null else t.started_at end,
        suspect = t.suspect and h.outcome = 'RELEASED',
        checkpoint = case when h.next_state <> 'COMPLETED' then t.checkpoint end
    from held h
    where t.id = h.id and h.next_state is not null
    returning t.id, t.state, t.queue, t.serial
), history as (
    insert into {schema}.attempts (task_id, attempt, claim_id, fence, worker_id, claimed_at, started_at, outcome, will_retry, error)
    select
        h.id, h.attempt, h.claim_id, h.fence, coalesce(h.claimed_by_worker_id, ''), coalesce(h.claimed_at, statement_timestamp()),
        coalesce(h.started_at, statement_timestamp()),
        case when h.next_state = 'CANCELLED' then 'CANCELLED' else h.outcome end, h.next_state = 'PENDING', h.error
    from held h
    where h.next_state is not null
    on conflict do nothing
), hint as materialized (
    select count(pg_notify(%(channel)s, payload)) filter (where (select pg_notification_queue_usage()) < 0.5) as hints from (
        select 'd:' || string_agg(s.id::text, ',') as payload
        from (select id, (row_number() over () - 1) / 200 as part from settled where state <> 'PENDING') s group by s.part
        union
        select 't:' || left(s.queue, 1000) from settled s where s.state = 'PENDING' or s.serial is not null
    ) hints
)
select
    string_agg(
        case
            when h.next_state is not null then h.next_state
            when p.outcome = h.outcome or (p.outcome = 'CANCELLED' and h.outcome <> 'COMPLETED') then 'already'
            else 'lost'
        end,
        ',' order by h.place
    ) as verdicts,
    (select hints from hint) as hints
from held h
left join lateral (
    select e.outcome from {schema}.attempts e where h.next_state is null and e.task_id = h.id and e.claim_id = h.claim_id limit 1
) p on true
