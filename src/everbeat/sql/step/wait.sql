-- Takes the first signal of a name that this task has not had yet, or says that the task waits for it (OPEN); past its timeout the
-- wait has TIMED_OUT. Only for whoever holds the claim_id; zero rows is a lost lease. What has ended stays as it ended.
-- Who is answered OPEN asks once more before it is suspended: a signal that was being stored when this statement began is not seen by
-- it, but by the next one (see schema/0005_steps/08_send_signal). A mark that a signal has set meanwhile, wake_at, is kept.
-- Lock order: workflow, then task.
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
              select from {schema}.steps taken where taken.task_id = h.id and taken.signal_id = s.id
          )
        order by s.sent_at, s.id limit 1
    ) s
    order by s.sent_at, s.id limit 1
), waited as (
    insert into {schema}.steps as w (task_id, kind, name, state, result, signal_id, due_at, attempt)
    select
        h.id, 'event', %(name)s::text,
        case when f.id is not null then 'DONE' when %(timeout_ms)s::bigint <= 0 then 'TIMED_OUT' else 'OPEN' end,
        f.value, f.id, statement_timestamp() + %(timeout_ms)s::bigint * interval '1 millisecond', h.attempt
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
