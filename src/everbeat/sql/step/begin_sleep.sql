-- Begin or continue a sleep. The end of the sleep is set once, by the database's clock. Requires the current claim_id; no row means a lost
-- lease. If the code is suspended, the task is due at that time. Return the remaining milliseconds. A sleep between two tries of a step
-- stores the failed try as its result, for people who inspect the task.
with held as materialized (
    select t.id, t.attempt from {schema}.tasks t
    where t.id = %(id)s and t.claim_id = %(claim_id)s and t.state = 'RUNNING'
    for no key update
), slept as (
    insert into {schema}.steps as s (task_id, kind, name, due_at, attempt, result)
    select
        h.id, 'sleep', %(name)s::text, statement_timestamp() + %(duration_ms)s::bigint * interval '1 millisecond', h.attempt,
        %(failed)s::text::json
    from held h
    on conflict (task_id, kind, name) do update set recorded_at = s.recorded_at
    returning s.task_id, s.due_at
), marked as (
    update {schema}.tasks t
    set wake_at = s.due_at, waits_for = null, progress_at = statement_timestamp()
    from slept s where t.id = s.task_id
)
select greatest(0, extract(epoch from s.due_at - statement_timestamp()) * 1000)::double precision as left_ms from slept s
