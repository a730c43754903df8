-- Begins a sleep, or goes on with one: its moment is set once, by the database's clock. Only for whoever holds the claim_id; zero rows is
-- a lost lease. The task is due at that moment, should its code be suspended. Answers how many milliseconds are left.
with held as materialized (
    select t.id, t.attempt from {schema}.tasks t
    where t.id = %(id)s and t.claim_id = %(claim_id)s and t.state = 'RUNNING'
    for no key update
), slept as (
    insert into {schema}.steps as s (task_id, kind, name, due_at, attempt)
    select h.id, 'sleep', %(name)s::text, statement_timestamp() + %(duration_ms)s::bigint * interval '1 millisecond', h.attempt from held h
    on conflict (task_id, kind, name) do update set recorded_at = s.recorded_at
    returning s.task_id, s.due_at
), marked as (
    update {schema}.tasks t
    set wake_at = s.due_at, waits_for = null, progress_at = statement_timestamp()
    from slept s where t.id = s.task_id
)
select greatest(0, extract(epoch from s.due_at - statement_timestamp()) * 1000)::double precision as left_ms from slept s
