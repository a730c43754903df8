-- Start claimed tasks: CLAIMED -> RUNNING. If good_until has passed, the task expires (CLAIMED -> EXPIRED) and no code runs. Requires the
-- current claim_id; a repeated call returns "started" again. The list can contain a task twice, for an old claim and the claim that
-- followed.
with asked as (
    select a.id, a.claim_id, nullif(a.policy::text, 'null') as policy, a.alone
    from rows from (
        unnest(%(ids)s::uuid[], %(claim_ids)s::uuid[], %(alone)s::boolean[]), json_array_elements(%(policies)s::json)
    ) as a (id, claim_id, alone, policy)
), held as materialized (
    select
        a.id, a.claim_id, a.policy, a.alone, t.state, t.attempt, t.started_at,
        case when t.state = 'CLAIMED' then
            case when t.good_until <= statement_timestamp() then 'expired' else 'started' end
        end as change
    from asked a
    left join lateral (
        select * from (select * from {schema}.tasks t where t.id = a.id limit 1 for no key update) t where t.claim_id = a.claim_id
    ) t on true
), started as (
    update {schema}.tasks t
    set state = 'RUNNING', started_at = statement_timestamp(), attempt = least(t.attempt::bigint + 1, 2147483647)::integer, policy = coalesce(t.policy, h.policy::json),
        alone = h.alone, checkpoint_number = 0
    from held h
    where t.id = h.id and h.change = 'started'
    returning t.id, t.attempt, t.started_at
), expired as (
    update {schema}.tasks t
    set state = 'EXPIRED', expired_at = statement_timestamp(), claim_id = null, claim_call = null,
        error = coalesce(
            (
                select json_build_object(
                    'code', 'TASK_EXPIRED',
                    'message', 'good_until passed while the task was claimed, before the task started again, after attempt ' || a.attempt,
                    'data', json_build_object('last_error', a.error))
                from {schema}.attempts a
                where a.task_id = t.id and a.outcome <> 'RELEASED'
                order by a.attempt desc
                limit 1
            ),
            json_build_object('code', 'TASK_EXPIRED', 'message', 'good_until passed while the task was claimed, before the task started')
        )
    from held h
    where t.id = h.id and h.change = 'expired'
    returning t.id, t.queue, t.serial, coalesce(t.workflow_id, t.batch_id) as whole_id
), {fragment/notify_of_expired}
select
    h.claim_id,
    coalesce(h.change, case when h.state = 'RUNNING' then 'started' else 'lost' end) as verdict,
    case when h.change = 'started' then least(h.attempt::bigint + 1, 2147483647)::integer else h.attempt end as attempt,
    case when h.change = 'started' then statement_timestamp() else h.started_at end as started_at,
    (select hints from hint) as hints
from held h
