-- Recover leases of dead workers: CLAIMED -> PENDING | CANCELLED, RUNNING -> PENDING | FAILED | CANCELLED. The domain or a hook has already
-- made the decision. The decision is applied here once, by a compare-and-swap on the claim_id and, for a holder judged by age, on the
-- watched heartbeats. A task that returns to PENDING keeps a note of the recovery in its row. The attempt and the recovery keep the whole
-- certificate. A call that is repeated after a lost reply finds its recoveries by its id and returns them again.
with watched as materialized (
    select s.id from {schema}.supervisors s where s.id = %(holder_id)s and s.beat_seq = %(holder_seq)s for share
), asked as (
    select * from unnest(
        %(ids)s::uuid[], %(claim_ids)s::uuid[], %(states)s::text[], %(worker_seqs)s::bigint[], %(actions)s::text[], %(retry_in_ms)s::bigint[],
        %(run_at)s::timestamptz[], %(retry_counts)s::integer[], %(outcomes)s::text[], %(suspects)s::boolean[], %(hooks)s::text[],
        %(errors)s::text[], %(causes)s::text[], %(last_beats)s::timestamptz[], %(noticed_after_ms)s::bigint[]
    ) as a (id, claim_id, state, worker_seq, action, retry_in_ms, run_at, retry_count, outcome, suspect, hook, error, cause, last_beat_at,
            noticed_after_ms)
    where %(holder_id)s::text is null or exists (select from watched)
), due as (
    select a.*,
        -- greatest() ignores nulls, so it must not be called without a run_at
        case when a.run_at is null then statement_timestamp() + a.retry_in_ms * interval '1 millisecond'
             else greatest(a.run_at, statement_timestamp()) end as retry_at
    from asked a
), held as materialized (
    select
        a.id, a.claim_id, a.state, a.outcome, a.cause, a.last_beat_at, a.noticed_after_ms, a.retry_at, a.retry_count,
        a.suspect, a.hook, t.name, t.queue, t.fence, t.attempt, t.claimed_by_worker_id, t.claimed_at, t.started_at, w.supervisor_id,
        w.hostname, w.pid,
        case when t.cancel_requested_at is not null then 'cancel' when l.is_too_late then 'fail' else a.action end as action,
        case when l.is_too_late then json_build_object(
                 'code', a.error::json -> 'code', 'data', a.error::json -> 'data',
                 'message', format(
                     '%%s It is not run again: its next run would be due at %%s, and its good_until is %%s',
                     replace(a.error, E'\\u0000', E'\\ufffd')::json ->> 'message', to_char(a.retry_at at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS.MS"+00:00"'),
                     to_char(t.good_until at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS.MS"+00:00"')))
             else a.error::json end as error,
        coalesce(replace(a.error, E'\\u0000', E'\\ufffd')::json ->> 'message', 'Its worker died.') as message
    from due a
    cross join lateral (select * from {schema}.tasks t where t.id = a.id for no key update skip locked) t
    cross join lateral (
        select coalesce(a.action in ('retry', 'reschedule') and a.state = 'RUNNING' and t.good_until <= a.retry_at, false) as is_too_late
    ) l
    left join {schema}.workers w on w.id = t.claimed_by_worker_id
    where t.claim_id = a.claim_id and t.state = a.state and (a.worker_seq is null or w.beat_seq = a.worker_seq)
), recovered as (
    update {schema}.tasks t
    set state = case h.action when 'fail' then 'FAILED' when 'cancel' then 'CANCELLED' else 'PENDING' end,
        error = case h.action when 'fail' then h.error
                    when 'cancel' then json_build_object('code', 'TASK_CANCELLED', 'message', format(
                        '%%s A cancel had been requested, so the task is not run again.', h.message))
                    else json_build_object(
                        'code', h.error -> 'code', 'data', h.error -> 'data', 'message', format('%%s %%s', h.message, case h.action
                            when 'requeue' then 'Its code had not started, so the task was put back into its queue.'
                            when 'reschedule' then 'A recovery hook runs the task again.'
                            else 'Its code had started, and its policy runs it again.' end)) end,
        failed_at = case when h.action = 'fail' then statement_timestamp() end,
        cancelled_at = case when h.action = 'cancel' then statement_timestamp() end,
        retry_count = case when h.action = 'reschedule' and h.retry_count is not null then h.retry_count
                          else least(
                              t.retry_count::bigint + (h.action in ('retry', 'reschedule') and h.state = 'RUNNING')::integer, 2147483647
                          )::integer end,
        crash_count = least(t.crash_count::bigint + (h.outcome is not distinct from 'CRASHED')::integer, 2147483647)::integer,
        loss_count = least(t.loss_count::bigint + (h.outcome is not distinct from 'LOST')::integer, 2147483647)::integer,
        suspect = h.action in ('requeue', 'retry', 'reschedule') and (t.suspect or h.suspect),
        next_retry_at = case when h.action in ('retry', 'reschedule') then h.retry_at when h.action = 'requeue' then t.next_retry_at end,
        enqueued_at = case when h.action in ('retry', 'reschedule') then h.retry_at
                          when h.action = 'requeue' then greatest(t.enqueued_at, h.retry_at) else t.enqueued_at end,
        waits_for = case when h.action = 'requeue' then t.waits_for end, wake_at = case when h.action = 'requeue' then t.wake_at end,
        claim_id = null, claim_call = null,
        claimed_at = case when h.action in ('fail', 'cancel') then t.claimed_at end,
        claimed_by_worker_id = case when h.action in ('fail', 'cancel') then t.claimed_by_worker_id end,
        started_at = case when h.action in ('fail', 'cancel') then t.started_at end
    from held h
    where t.id = h.id
    returning t.id, t.state, t.queue, t.serial, t.retry_count, t.crash_count, t.loss_count, coalesce(t.workflow_id, t.batch_id) as whole_id
), history as (
    insert into {schema}.attempts (task_id, attempt, claim_id, fence, worker_id, claimed_at, started_at, outcome, will_retry, error)
    select
        h.id, h.attempt, h.claim_id, h.fence, coalesce(h.claimed_by_worker_id, ''), coalesce(h.claimed_at, statement_timestamp()),
        coalesce(h.started_at, statement_timestamp()), h.outcome, h.action in ('retry', 'reschedule'), h.error
    from held h where h.state = 'RUNNING'
    on conflict do nothing
), noted as (
    insert into {schema}.recoveries (
        task_id, name, queue, fence, claim_id, attempt, worker_id, supervisor_id, hostname, pid, was, cause, noticed_by,
        last_beat_at, noticed_after_ms, action, next_retry_at, recovered_by, certificate, charge, suspect, hook, call
    )
    select h.id, left(h.name, 1000), h.queue, h.fence, h.claim_id, h.attempt, coalesce(h.claimed_by_worker_id, ''), h.supervisor_id, h.hostname, h.pid, h.state, h.cause,
        %(noticed_by)s, h.last_beat_at, h.noticed_after_ms, h.action,
        case when h.action in ('retry', 'reschedule', 'requeue') then h.retry_at end, %(recovered_by)s, h.error,
        case h.outcome when 'CRASHED' then 'crash' when 'LOST' then 'loss' end,
        h.suspect and h.action in ('retry', 'reschedule'), h.hook, %(call)s
    from held h
), hint as materialized (
    select count(pg_notify(%(channel)s, payload)) filter (where (select pg_notification_queue_usage()) < 0.5) as hints from (
        select 'd:' || string_agg(r.id::text, ',') as payload
        from (select id, (row_number() over () - 1) / 200 as part from recovered where state <> 'PENDING') r group by r.part
        union
        select 't:' || left(r.queue, 1000) from recovered r where r.state = 'PENDING' or r.serial is not null
        union
        select 'w' from recovered r where r.state <> 'PENDING' and r.whole_id is not null
        union
        select 'l:' || string_agg(r.id::text, ',')
        from (select id, (row_number() over () - 1) / 200 as part from recovered) r group by r.part
    ) hints
)
select
    h.id, h.name, h.state as was, h.action, r.state, h.claimed_by_worker_id, h.cause, h.noticed_after_ms, h.outcome, h.hook, r.retry_count,
    r.crash_count, r.loss_count, h.attempt, (select hints from hint) as hints
from held h join recovered r on r.id = h.id
union all
select
    b.task_id, b.name, b.was, b.action, case b.action when 'fail' then 'FAILED' when 'cancel' then 'CANCELLED' else 'PENDING' end,
    b.worker_id, b.cause, b.noticed_after_ms, case b.charge when 'crash' then 'CRASHED' when 'loss' then 'LOST' end, b.hook,
    coalesce(t.retry_count, 0), coalesce(t.crash_count, 0), coalesce(t.loss_count, 0), coalesce(b.attempt, 0), null
from {schema}.recoveries b
left join {schema}.tasks t on t.id = b.task_id
where b.task_id = any (%(ids)s::uuid[]) and b.call = %(call)s
