-- Settle attempts whose code returned: RUNNING -> COMPLETED, even with a cancel request. Requires the current claim_id. Return the
-- positions, in the given lists, of the attempts that this call completed. For the other attempts, task/settle_attempts returns the
-- verdict: an earlier try took effect, or the lease is lost. All parameters are texts, as in task/settle_attempts. Only the row's lease
-- matters here, so the row is not read before it changes. The state is compared as an expression, so that the planner does not find the
-- rows through the index of leases.
with asked as (
    select a.id, a.claim_id, a.result, a.place
    from rows from (
        unnest(%(ids)s::text::uuid[], %(claim_ids)s::text::uuid[]), json_array_elements(%(results)s::text::json)
    ) with ordinality as a (id, claim_id, result, place)
), completed as (
    update {schema}.tasks t
    set state = 'COMPLETED', result = a.result, error = null, completed_at = statement_timestamp(), next_retry_at = null,
        claim_id = null, claim_call = null, suspect = false, checkpoint = null
    from asked a
    where t.id = a.id and t.claim_id = a.claim_id and t.state || '' = 'RUNNING'
    returning t.id, a.claim_id, a.place, t.attempt, t.fence, t.claimed_by_worker_id, t.claimed_at, t.started_at, t.queue, t.serial
), history as (
    insert into {schema}.attempts (task_id, attempt, claim_id, fence, worker_id, claimed_at, started_at, outcome, will_retry)
    select
        c.id, c.attempt, c.claim_id, c.fence, coalesce(c.claimed_by_worker_id, ''), coalesce(c.claimed_at, statement_timestamp()),
        coalesce(c.started_at, statement_timestamp()), 'COMPLETED', false
    from completed c
    on conflict do nothing
), hint as materialized (
    select count(pg_notify(%(channel)s, payload)) filter (where (select pg_notification_queue_usage()) < 0.5) as hints from (
        select 'd:' || string_agg(c.id::text, ',') as payload
        from (select id, (row_number() over () - 1) / 200 as part from completed) c group by c.part
        union
        select 't:' || left(c.queue, 1000) from completed c where c.serial is not null
    ) hints
)
select array_agg(c.place) as places, (select hints from hint) as hints from completed c
