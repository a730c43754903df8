-- Send a portion of the children of a gather: each only once across all the task's attempts, because the task derives their ids. The first
-- portion records the gather and its batch, and the last one seals the batch. Requires the parent's current claim_id; no row means a lost
-- lease. Return whether the parent has a cancel request; then nothing is sent. Lock order: batch, then task.
-- The part "context" stores carriers, for workers that trace.
with whole as materialized (
    select b.id from {schema}.batches b where b.id = %(batch_id)s for no key update
), held as materialized (
    select t.id, t.attempt, t.labels, t.cancel_requested_at is not null as is_cancelled
    from {schema}.tasks t
    where t.id = %(id)s and t.claim_id = %(claim_id)s and t.state = 'RUNNING' and (select count(*) from whole) >= 0
    for no key update
), begun as (
    insert into {schema}.batches (id, name, waiter_id, sealed_at)
    select %(batch_id)s, %(step)s::text, h.id, case when %(is_last)s then statement_timestamp() end
    from held h where not h.is_cancelled
    on conflict do nothing
), sealed as (
    update {schema}.batches b
    set sealed_at = statement_timestamp()
    from held h where b.id = %(batch_id)s and b.sealed_at is null and %(is_last)s and not h.is_cancelled
), kinds as (
    select k.*
    from unnest(
        %(names)s::text[], %(queues)s::text[], %(priorities)s::smallint[], %(policies)s::text[], %(flags)s::text[], %(good_until)s::timestamptz[],
        %(serials)s::text[], %(gates)s::text[], %(costs)s::text[], %(labels)s::text[]
    ) with ordinality as k (name, queue, priority, policy, flags, good_until, serial, gates, costs, labels, kind)
), sent as (
    insert into {schema}.tasks (
        id, name, queue, priority, args, policy, flags, good_until, serial, sent_at, enqueued_at, serial_at, parent_id, gates, costs, batch_id, labels
        -- [context
        , context
        -- context]
    )
    select
        r.id, k.name, k.queue, k.priority, r.args, k.policy::json, k.flags::json, k.good_until, k.serial, statement_timestamp(),
        statement_timestamp(), case when k.serial is not null then statement_timestamp() end, h.id, k.gates::text[], k.costs::integer[],
        %(batch_id)s, coalesce(h.labels || k.labels::jsonb, h.labels, k.labels::jsonb)
        -- [context
        , nullif(r.context::text, 'null')::json
        -- context]
    from rows from (
        unnest(%(ids)s::text::uuid[], %(kinds)s::text::bigint[]), json_array_elements(%(args)s::text::json)
        -- [context
        , json_array_elements(%(contexts)s::text::json)
        -- context]
    ) as r (
        id, kind, args
        -- [context
        , context
        -- context]
    )
    join kinds k on k.kind = r.kind
    cross join held h
    where not h.is_cancelled
    on conflict do nothing
    returning id, queue
), noted as (
    insert into {schema}.batch_events (batch_id, number)
    select %(batch_id)s, (select count(*) from sent) from held h where not h.is_cancelled
), recorded as (
    insert into {schema}.steps as s (task_id, kind, name, state, result, attempt, digest)
    select
        h.id, 'child', %(step)s::text, case when %(is_last)s then 'DONE' else 'OPEN' end, to_json(%(batch_id)s::uuid), h.attempt,
        %(digest)s::text
    from held h where not h.is_cancelled
    on conflict (task_id, kind, name) do update
    set state = case when s.state = 'DONE' then 'DONE' else excluded.state end, recorded_at = statement_timestamp()
)
select
    h.is_cancelled,
    (select count(pg_notify(%(channel)s::text, 't:' || left(q.queue, 1000))) filter (where (select pg_notification_queue_usage()) < 0.5)
     from (select distinct s.queue from sent s) q
     where exists (select from {schema}.workers w where w.listens and w.ended_at is null)) as hints
from held h
