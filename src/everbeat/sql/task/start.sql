-- Starts claimed tasks: CLAIMED -> RUNNING; past good_until CLAIMED -> EXPIRED, and no code runs.
-- Only for whoever holds the claim_id; a repeated call answers "started" again. A task may be asked for twice, by an old claim and
-- its successor.
with asked as (
    select * from unnest(%(ids)s::uuid[], %(claim_ids)s::uuid[], %(policies)s::text[], %(alone)s::boolean[]) 
        as a (id, claim_id, policy, alone)
), held as materialized (
    select t.id, a.claim_id, a.policy, a.alone, t.state, t.attempt, t.started_at, t.good_until <= statement_timestamp() as too_late
    from asked a
    cross join lateral (select * from {schema}.tasks t where t.id = a.id for no key update) t
    where t.claim_id = a.claim_id
), started as (
    update {schema}.tasks t
    set state = 'RUNNING', started_at = statement_timestamp(), attempt = t.attempt + 1, policy = coalesce(t.policy, h.policy::json),
        alone = h.alone, checkpoint_number = 0
    from held h
    where t.id = h.id and h.state = 'CLAIMED' and h.too_late is not true
    returning t.id, t.attempt, t.started_at
), expired as (
    update {schema}.tasks t
    set state = 'EXPIRED', expired_at = statement_timestamp(), claim_id = null, claim_call = null,
        error = json_build_object('code', 'TASK_EXPIRED', 'message', 'good_until passed while the task was claimed, before its code started')
    from held h
    where t.id = h.id and h.state = 'CLAIMED' and h.too_late
    returning t.id, t.queue, t.serial
), hint as materialized (
    select count(pg_notify(%(channel)s, payload)) as hints from (
        select 'd:' || string_agg(e.id::text, ',') as payload
        from (select id, (row_number() over () - 1) / 200 as part from expired) e group by e.part
        union
        select 't:' || e.queue from expired e where e.serial is not null
    ) hints
)
select
    a.claim_id,
    case
        when s.id is not null then 'started'
        when e.id is not null then 'expired'
        when h.state = 'RUNNING' then 'started'
        else 'lost'
    end as verdict,
    coalesce(s.attempt, h.attempt) as attempt,
    coalesce(s.started_at, h.started_at) as started_at,
    (select hints from hint) as hints
from asked a
left join held h on h.claim_id = a.claim_id
left join started s on s.id = h.id
left join expired e on e.id = h.id
