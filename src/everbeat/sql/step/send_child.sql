-- Send a child of a running task; it is sent only once across all the task's attempts. Requires the parent's current claim_id; no row means
-- a lost lease. The child's id is derived from the parent's id and the name of this step. The id begins with the parent's time, as in a
-- UUIDv7. The child inherits the parent's labels. As with a normal send, a live task with the same name and key is returned instead. Return the id and the verdict: sent, cancelled
-- (the parent has a cancel request), or again. After `again`, repeat the call, because another transaction is changing the same rows.
-- The part "batch" adds the child to the parent's batch, even if the batch is sealed: it cannot end while the parent runs. If the parent has no batch,
-- the verdict is no_batch. The part "context" stores a carrier, for workers that trace.
with held as materialized (
    select t.id, t.attempt, t.labels, t.cancel_requested_at is not null as is_cancelled,
        encode(
            substr(uuid_send(t.id), 1, 6)
            || set_byte(set_byte(substr(sha256(uuid_send(t.id) || convert_to(%(step)s::text, 'UTF8')), 1, 10), 0, 112), 2, 128),
            'hex'
        )::uuid as child_id
        -- [batch
        , t.batch_id
        -- batch]
    from {schema}.tasks t
    where t.id = %(id)s and t.claim_id = %(claim_id)s and t.state = 'RUNNING'
    for no key update
), known as materialized (
    select (s.result #>> '{{}}')::uuid as id
    from held h join {schema}.steps s on s.task_id = h.id and s.kind = 'child' and s.name = %(step)s::text
), sent as (
    insert into {schema}.tasks (
        id, name, queue, priority, args, key, policy, flags, good_until, serial, sent_at, enqueued_at, serial_at, parent_id, gates, costs, labels
        -- [batch
        , batch_id
        -- batch]
        -- [context
        , context
        -- context]
    )
    select
        h.child_id, %(name)s::text, %(queue)s::text, %(priority)s::smallint, %(args)s::text::json, %(key)s::text, %(policy)s::text::json,
        %(flags)s::text::json, %(good_until)s::timestamptz, %(serial)s::text, statement_timestamp(), statement_timestamp(),
        case when %(serial)s::text is not null then statement_timestamp() end, h.id,
        %(gates)s::text::text[], %(costs)s::text::integer[],
        coalesce(h.labels || %(labels)s::text::jsonb, h.labels, %(labels)s::text::jsonb)
        -- [batch
        , h.batch_id
        -- batch]
        -- [context
        , %(context)s::text::json
        -- context]
    from held h
    where not h.is_cancelled and not exists (select from known)
        -- [batch
        and h.batch_id is not null
        -- batch]
    on conflict do nothing
    returning id, queue
), chosen as materialized (
    select s.id from sent s
    union all
    (
        select t.id from held h join {schema}.tasks t on t.id = h.child_id or (
            %(key)s::text is not null and t.name = %(name)s::text and t.key = %(key)s::text and t.state in ('PENDING', 'CLAIMED', 'RUNNING')
        )
        where not h.is_cancelled and not exists (select from sent) and not exists (select from known)
        order by t.id = h.child_id desc limit 1
    )
), recorded as (
    insert into {schema}.steps as s (task_id, kind, name, result, attempt, digest)
    select h.id, 'child', %(step)s::text, to_json(c.id), h.attempt, %(digest)s::text
    from held h cross join chosen c
    on conflict (task_id, kind, name) do update set recorded_at = s.recorded_at
    returning (s.result #>> '{{}}')::uuid as id
-- [batch
), noted as (
    insert into {schema}.batch_events (batch_id, number) select h.batch_id, 1 from held h cross join sent
-- batch]
)
select
    case
        when k.id is not null or r.id is not null then 'sent'
        when h.is_cancelled then 'cancelled'
        -- [batch
        when h.batch_id is null then 'no_batch'
        -- batch]
        else 'again'
    end as verdict,
    coalesce(k.id, r.id) as id,
    (select count(pg_notify(%(channel)s::text, 't:' || left(s.queue, 1000))) filter (where (select pg_notification_queue_usage()) < 0.5) from sent s
     where exists (select from {schema}.workers w where w.listens and w.ended_at is null)) as hints
from held h
left join known k on true
left join recorded r on true
