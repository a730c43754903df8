-- Settle attempts: RUNNING -> COMPLETED | FAILED | CANCELLED | PENDING (a retry, a release without charge, or suspended until wake_at).
-- Requires the current claim_id. An attempt that was already settled returns "already"; no row means a lost lease. A suspended task has
-- already started, so good_until no longer applies, and a signal can still change its wake_at. HANDED_BACK is a RELEASED whose code has
-- begun, so its good_until no longer applies either: the shutdown of its worker must not expire the task. POSTPONED is a SUSPENDED with its
-- own due time, and becomes FAILED if the task was postponed too often or its good_until passes first. The earlier postponed attempts are
-- counted by their error code, since an operator's last retry. If its error names a limit (RateLimited), the task's gate is closed until
-- then. This is part of the same transaction, so that no other task starts in between. If the limit is not one of the task's own, the task
-- fails. A cancel request never hides a success. After a cancel request, any other outcome becomes CANCELLED and never a retry. The
-- parameters are JSON arrays, because quoting a large result as an element of a text array takes minutes. All parameters are texts, so that
-- any driver works if the code settles the attempt in its own commit. Return one row with the verdicts, in the given order, and the stored
-- errors of POSTPONED attempts that failed instead, by place. If the task runs again, `context` replaces its carrier, unless it is null. A
-- task whose code ended without a crash is no longer a suspect. The end of a task releases the next task of its serial line. Without
-- `limit 1`, the planner would move the condition on the state into the lookup and read the whole index of leases for each row. Two lists
-- are never joined: each row is looked up by its key.
with asked as (
    select
        a.id, a.claim_id, case a.outcome when 'HANDED_BACK' then 'RELEASED' when 'POSTPONED' then 'SUSPENDED' else a.outcome end as outcome,
        a.outcome in ('HANDED_BACK', 'SUSPENDED') as has_begun, a.outcome = 'POSTPONED' as is_postponed, a.most_postponed,
        case
            when a.run_at is not null then greatest(a.run_at, statement_timestamp())
            else statement_timestamp() + a.retry_in_ms * interval '1 millisecond'
        end as retry_at,
        a.result, nullif(a.error::text, 'null')::json as error, nullif(a.context::text, 'null')::json as context, a.place,
        case when a.outcome = 'POSTPONED' then a.error -> 'data' ->> 'limit' end as limit_name
    from rows from (
        unnest(
            %(ids)s::text::uuid[], %(claim_ids)s::text::uuid[], %(outcomes)s::text::text[], %(retry_in_ms)s::text::bigint[],
            %(run_ats)s::text::timestamptz[], %(most_postponed)s::text::integer[]
        ),
        json_array_elements(%(results)s::text::json), json_array_elements(%(errors)s::text::json),
        json_array_elements(%(contexts)s::text::json)
    ) with ordinality as a (id, claim_id, outcome, retry_in_ms, run_at, most_postponed, result, error, context, place)
), held as materialized (
    select
        a.id, a.claim_id, a.has_begun, a.is_postponed, a.retry_at, a.result, a.context, a.place, a.limit_name, t.gates,
        t.queue, t.fence, t.attempt, t.claimed_by_worker_id, t.claimed_at, t.started_at, next.state as next_state,
        case when a.is_postponed and next.state = 'FAILED' then 'FAILED' else a.outcome end as outcome,
        case
            when a.is_postponed and next.state = 'FAILED' and own.is_missing then json_build_object(
                'code', 'UNKNOWN_LIMIT', 'message', 'The code raised RateLimited for limit ''' || a.limit_name
                    || ''', which is not a limit of this task. The task has: ' || coalesce(own.names, 'none')
                    || '. Fix: name one of these limits, or add the limit to the limits of the task.',
                'data', a.error -> 'data', 'type', a.error -> 'type', 'traceback', a.error -> 'traceback'
            )
            when a.is_postponed and next.state = 'FAILED' then json_build_object(
                'code', 'RETRY_LATER_EXHAUSTED', 'message', case
                    when past.postponed >= a.most_postponed
                    then 'The task was to run again later after each of ' || past.postponed || ' earlier attempts, and its limit is '
                        || a.most_postponed || '. '
                    else 'The good_until of the task passes before the time at which it was to run again. '
                end || coalesce(a.error ->> 'message', ''),
                'data', a.error -> 'data', 'type', a.error -> 'type', 'traceback', a.error -> 'traceback'
            )
            when not (a.is_postponed and next.state = 'CANCELLED') then a.error
        end as error
    from asked a
    left join lateral (
        select * from (select * from {schema}.tasks t where t.id = a.id limit 1 for no key update) t
        where t.claim_id = a.claim_id and t.state = 'RUNNING'
    ) t on true
    left join lateral (
        select count(*)::integer as postponed from {schema}.attempts e
        where a.is_postponed and e.task_id = t.id and e.attempt > t.counted_from and e.outcome = 'SUSPENDED'
          and {schema}.object_of(e.error) ->> 'code' = {schema}.object_of(a.error) ->> 'code'
    ) past on true
    cross join lateral (
        select string_agg(split_part(u.gate, '/', 1), ', ' order by u.place) as names,
            a.limit_name is not null and count(*) filter (where split_part(u.gate, '/', 1) = a.limit_name) = 0 as is_missing
        from unnest(case when a.limit_name is not null then t.gates end) with ordinality as u (gate, place)
    ) own
    cross join lateral (
        select case
            when t.id is null then null
            when a.outcome = 'COMPLETED' then 'COMPLETED'
            when t.cancel_requested_at is not null or a.outcome = 'CANCELLED' then 'CANCELLED'
            when a.outcome in ('RELEASED', 'SUSPENDED') and not a.is_postponed then 'PENDING'
            when a.retry_at is not null and (t.good_until is null or t.good_until > a.retry_at)
                 and (not a.is_postponed or past.postponed < a.most_postponed and not own.is_missing) then 'PENDING'
            else 'FAILED'
        end as state
    ) next
), settled as (
    update {schema}.tasks t
    set state = h.next_state,
        result = case when h.next_state = 'COMPLETED' then h.result end,
        error = case when h.next_state = 'COMPLETED' or h.outcome in ('RELEASED', 'SUSPENDED') and not h.is_postponed then null
                     when h.next_state = 'CANCELLED'
                     then coalesce(h.error, json_build_object('code', 'TASK_CANCELLED', 'message', 'cancelled while running'))
                     else h.error end,
        completed_at = case when h.next_state = 'COMPLETED' then statement_timestamp() end,
        failed_at = case when h.next_state = 'FAILED' then statement_timestamp() end,
        cancelled_at = case when h.next_state = 'CANCELLED' then statement_timestamp() end,
        retry_count = least(t.retry_count::bigint + (h.next_state = 'PENDING' and h.outcome = 'FAILED')::integer, 2147483647)::integer,
        next_retry_at = case when h.next_state = 'PENDING' and (h.outcome = 'FAILED' or h.is_postponed) then h.retry_at end,
        enqueued_at = case
            when h.next_state = 'PENDING' and (h.outcome = 'FAILED' or h.is_postponed) then h.retry_at
            when h.next_state = 'PENDING' and h.outcome = 'SUSPENDED' then coalesce(t.wake_at, statement_timestamp())
            else t.enqueued_at
        end,
        good_until = case when h.next_state = 'PENDING' and h.has_begun then null else t.good_until end,
        waits_for = case when h.next_state = 'PENDING' and h.outcome = 'SUSPENDED' and not h.is_postponed then t.waits_for end,
        wake_at = case when h.next_state = 'PENDING' and h.outcome = 'SUSPENDED' and not h.is_postponed then t.wake_at end,
        claim_id = null, claim_call = null,
        claimed_at = case when h.next_state = 'PENDING' then null else t.claimed_at end,
        claimed_by_worker_id = case when h.next_state = 'PENDING' then null else t.claimed_by_worker_id end,
        started_at = case when h.next_state = 'PENDING' then null else t.started_at end,
        suspect = t.suspect and h.outcome = 'RELEASED',
        checkpoint = case when h.next_state <> 'COMPLETED' then t.checkpoint end,
        context = case when h.next_state = 'PENDING' then coalesce(h.context, t.context) else t.context end
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
), closed as materialized (
    select count({schema}.close_gate(u.gate, extract(epoch from h.retry_at))) as gates
    from held h
    cross join lateral unnest(h.gates) as u (gate)
    where h.next_state in ('PENDING', 'FAILED') and split_part(u.gate, '/', 1) = h.limit_name
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
            when h.is_postponed and p.outcome = 'FAILED' then 'already'
            else 'lost'
        end,
        ',' order by h.place
    ) as verdicts,
    (select hints from hint) as hints,
    json_object_agg(h.place, case when h.next_state is null then p.error else h.error end) filter (
        where h.is_postponed and (h.next_state = 'FAILED' or h.next_state is null and p.outcome = 'FAILED')
    )::text as errors,
    (select gates from closed) as closed
from held h
left join lateral (
    select e.outcome, e.error from {schema}.attempts e where h.next_state is null and e.task_id = h.id and e.claim_id = h.claim_id limit 1
) p on true
