-- Insert completed tasks, each with one attempt.
with finished as (
    insert into {schema}.tasks (id, name, queue, state, args, sent_at, enqueued_at, claimed_at, claimed_by_worker_id, started_at,
        completed_at, fence, attempt, result)
    select gen_random_uuid(), 'bench_filler', 'default', 'COMPLETED', '{{"number": 1}}', past, past, past, 'before', past, past, 1, 1, '1'
    from (select statement_timestamp() - interval '1 day' as past from generate_series(1, %(rows)s::bigint)) filler
    returning id, started_at
)
insert into {schema}.attempts (task_id, attempt, claim_id, fence, worker_id, claimed_at, started_at, ended_at, outcome, will_retry)
select id, 1, gen_random_uuid(), 1, 'before', started_at, started_at, started_at, 'COMPLETED', false from finished
