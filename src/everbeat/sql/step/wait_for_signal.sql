-- Take the first signal with this name that the task has not received yet. If there is no such signal, record that the task is waiting for
-- one (OPEN). After its timeout, the wait is TIMED_OUT. Requires the current claim_id; no row means a lost lease. A finished wait stays
-- finished. After OPEN, the caller repeats the call once before the task is suspended. This statement does not see a signal that was being
-- stored when the statement began, but the next call does (see schema/0009_liveness/93_send_signal.sql). If a signal has set wake_at in the
-- meantime, that value is kept. Lock order: workflow, then task. Because of `offset 0`, each signal is looked up by its id, rather than by
-- a scan of all signals that the task has received. `question`: what a person is to answer, or null. The wait's row contains it as the
-- result until the answer arrives.
with whole as materialized (
    select w.id from {schema}.workflows w
    where w.id = (select t.workflow_id from {schema}.tasks t where t.id = %(id)s)
    for share
), held as materialized (
    select t.id, t.attempt, t.workflow_id from {schema}.tasks t
    where t.id = %(id)s and t.claim_id = %(claim_id)s and t.state = 'RUNNING' and (select count(*) from whole) >= 0
    for no key update
), found as materialized (
    select s.id, s.value
    from held h
    cross join lateral unnest(array[h.id, h.workflow_id]) as target (id)
    cross join lateral (
        select s.id, s.value, s.sent_at from {schema}.signals s
        where s.target = target.id and s.name = %(event)s::text
          and not exists (
              select from {schema}.steps taken where taken.task_id = h.id and taken.signal_id = s.id offset 0
          )
        order by s.sent_at, s.id limit 1
    ) s
    order by s.sent_at, s.id limit 1
), waited as (
    insert into {schema}.steps as w (task_id, kind, name, state, result, signal_id, due_at, attempt)
    select
        h.id, 'event', %(name)s::text,
        case when f.id is not null then 'DONE' when %(timeout_ms)s::bigint <= 0 then 'TIMED_OUT' else 'OPEN' end,
        coalesce(f.value, %(question)s::text::json), f.id, statement_timestamp() + %(timeout_ms)s::bigint * interval '1 millisecond', h.attempt
    from held h left join found f on true
    on conflict (task_id, kind, name) do update
    set state = case
            when w.state <> 'OPEN' then w.state
            when excluded.signal_id is not null then 'DONE'
            when w.due_at <= statement_timestamp() then 'TIMED_OUT'
            else 'OPEN'
        end,
        result = case when w.state = 'OPEN' then excluded.result else w.result end,
        signal_id = case when w.state = 'OPEN' then excluded.signal_id else w.signal_id end,
        recorded_at = case when w.state = 'OPEN' then statement_timestamp() else w.recorded_at end
    returning w.task_id, w.state, w.result, w.due_at, w.begun_at < statement_timestamp() as is_known
), marked as (
    update {schema}.tasks t
    set waits_for = case when w.state = 'OPEN' then %(event)s::text end,
        wake_at = case
            when w.state <> 'OPEN' then null
            when w.is_known and t.waits_for = %(event)s::text then t.wake_at
            else coalesce(w.due_at, statement_timestamp() + interval '100 years')
        end,
        progress_at = statement_timestamp()
    from waited w where t.id = w.task_id
)
select w.state, w.result::text from waited w
