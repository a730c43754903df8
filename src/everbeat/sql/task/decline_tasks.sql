-- Release tasks whose arguments this worker's code does not know, and mark their needs. CLAIMED | RUNNING -> PENDING, or CANCELLED if a
-- cancel was requested. No code of the task has run: there is no attempt row, no attempt is charged, and the task keeps its place in its
-- queue. Requires the current claim_id. A repeated call finds no lease and changes nothing. When a task without a policy first starts, the
-- worker's own policy is stored with "is_default" in it. A decline removes that policy, because the code that will run the task has its
-- own. A task is "unmarkable", and its row stays unchanged, if a name occurs twice or if the names take more than 4096 bytes. A task is
-- also unmarkable if its row already has exactly this mark. The holder of the task knew the mark at the time of the claim, so the holder
-- would decline the task forever. Without `limit 1`, the planner would move the condition on the state into the lookup and read the whole
-- index of leases for each row.
with asked as (
    select * from unnest(%(ids)s::uuid[], %(claim_ids)s::uuid[]) as a (id, claim_id)
), held as materialized (
    select t.id, t.claim_id, t.name, t.args, t.needs_id, t.gates is not null as has_limits, t.cancel_requested_at is not null as is_cancelled
    from asked a
    cross join lateral (select * from {schema}.tasks t where t.id = a.id limit 1 for no key update) t
    where t.claim_id = a.claim_id and t.state in ('CLAIMED', 'RUNNING')
), named as materialized (
    select h.id, given.needs, given.has_doubles
    from held h
    cross join lateral (
        select case
                when h.has_limits
                    then json_build_object('arguments', coalesce(json_agg(k.name order by k.name collate "C"), '[]'::json), 'limits', true)
                else json_build_object('arguments', coalesce(json_agg(k.name order by k.name collate "C"), '[]'::json))
            end as needs,
            count(*) > count(distinct k.name) as has_doubles
        from json_object_keys(h.args) k (name)
    ) given
), judged as materialized (
    select h.*, n.needs, mark.id as mark,
        case
            when h.is_cancelled then 'CANCELLED'
            when n.has_doubles or octet_length(n.needs::text) > 4096 or mark.id = h.needs_id then 'unmarkable'
            else 'PENDING'
        end as verdict
    from held h
    join named n on n.id = h.id
    cross join lateral (select {schema}.mark_of(h.name, n.needs) as id) mark
), declined as (
    update {schema}.tasks t
    set state = j.verdict,
        needs = case when j.verdict = 'PENDING' then j.needs else t.needs end,
        needs_id = case when j.verdict = 'PENDING' then j.mark else t.needs_id end,
        cancelled_at = case when j.verdict = 'CANCELLED' then statement_timestamp() end,
        error = case when j.verdict = 'CANCELLED' then json_build_object('code', 'TASK_CANCELLED', 'message', 'cancelled before its code started') end,
        attempt = t.attempt - (t.state = 'RUNNING')::integer,
        policy = case when t.state = 'RUNNING' and t.attempt = 1 and t.policy ->> 'is_default' = 'true' then null else t.policy end,
        claim_id = null, claim_call = null, claimed_at = null, claimed_by_worker_id = null, started_at = null, alone = false
    from judged j
    where t.id = j.id and j.verdict <> 'unmarkable'
    returning t.id, t.state, t.queue, t.serial, coalesce(t.workflow_id, t.batch_id) as whole_id
), hint as materialized (
    select count(pg_notify(%(channel)s, payload)) filter (where (select pg_notification_queue_usage()) < 0.5) as hints from (
        select 'd:' || string_agg(d.id::text, ',') as payload
        from (select id, (row_number() over () - 1) / 200 as part from declined where state = 'CANCELLED') d group by d.part
        union
        select 't:' || left(d.queue, 1000) from declined d where d.state = 'CANCELLED' and d.serial is not null
        union
        select 'w' from declined d where d.state = 'CANCELLED' and d.whole_id is not null
        union
        select 'm' from declined d where d.state = 'PENDING'
    ) hints
)
select j.claim_id, j.verdict, (select hints from hint) as hints from judged j
