-- Claims due tasks for one worker: PENDING -> CLAIMED. Each gets a new random claim_id and the next fence.
-- A repeated call (same claim_call) answers what the first one took; an ended worker gets nothing.
-- Lanes, i.e. distinct (queue, priority), are found by skipping through the index; the best lane is emptied first.
with recursive caller as materialized (
    select id from {schema}.workers where id = %(worker_id)s and ended_at is null for key share
), again as materialized (
    select t.id from {schema}.tasks t
    where t.claimed_by_worker_id = %(worker_id)s and t.state in ('CLAIMED', 'RUNNING') and t.claim_call = %(claim_call)s
), lane (queue, priority) as (
    (select queue, priority from {schema}.tasks where state = 'PENDING' order by queue, priority limit 1)
    union all
    select next_lane.queue, next_lane.priority
    from lane
    cross join lateral (
        select t.queue, t.priority from {schema}.tasks t
        where t.state = 'PENDING' and (t.queue, t.priority) > (lane.queue, lane.priority)
        order by t.queue, t.priority limit 1
    ) next_lane
), ready as materialized (
    select lane.queue, lane.priority, coalesce(q.priority, 100) as queue_priority, head.enqueued_at
    from lane
    left join unnest(%(queue_names)s::text[], %(queue_priorities)s::integer[]) as q (name, priority) on q.name = lane.queue
    cross join lateral (
        select t.enqueued_at from {schema}.tasks t
        where t.state = 'PENDING' and t.queue = lane.queue and t.priority = lane.priority
          and t.enqueued_at <= statement_timestamp()
        order by t.enqueued_at limit 1
    ) head
    where %(queues)s::text[] is null or lane.queue = any(%(queues)s::text[])
), picked as materialized (
    select due.id
    from (select * from ready order by queue_priority, priority, enqueued_at) r
    cross join lateral (
        select t.id from {schema}.tasks t
        where t.state = 'PENDING' and t.queue = r.queue and t.priority = r.priority
          and t.enqueued_at <= statement_timestamp() and t.name = any(%(names)s::text[])
          and (t.good_until is null or t.good_until > statement_timestamp())
        order by t.enqueued_at, t.id
        limit %(limit)s
        for no key update skip locked
    ) due
    where exists (select from caller) and not exists (select from again)
    limit %(limit)s
), taken as (
    update {schema}.tasks t
    set state = 'CLAIMED', claim_id = gen_random_uuid(), claim_call = %(claim_call)s, fence = t.fence + 1,
        claimed_at = statement_timestamp(), claimed_by_worker_id = %(worker_id)s, started_at = null, progress = null
    from picked p
    where t.id = p.id
    returning t.id, t.claim_id, t.fence, t.name, t.queue, t.priority, t.args::text, t.attempt, t.retry_count, t.crash_count, t.loss_count,
        t.policy::text, t.enqueued_at, t.good_until
)
select * from taken
union all
select t.id, t.claim_id, t.fence, t.name, t.queue, t.priority, t.args::text, t.attempt, t.retry_count, t.crash_count, t.loss_count,
    t.policy::text, t.enqueued_at, t.good_until
from {schema}.tasks t join again a on a.id = t.id
