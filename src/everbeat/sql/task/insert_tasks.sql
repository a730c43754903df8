-- Send many tasks at once, all or none: nothing -> PENDING. The client's ids make the call idempotent. Keys are inserted in a fixed order,
-- so that two such statements cannot deadlock. Values that many tasks share are sent once. Return only the tasks that were not inserted as
-- given, after one row for the notifications. They are sent only in the user's own transaction (`joined`; see task/insert_task).
-- The part "batch" adds the tasks to a batch, unless it is sealed. A seal waits for the lock of the batch, so no send is left behind it. The
-- first row then contains the batch's verdict. A send without a batch leaves the part out.
-- The part "context" stores carriers, for senders that trace.
with kinds as (
    select k.*, k.delay_ms * interval '1 millisecond' as delay
    from unnest(
        %(names)s::text[], %(queues)s::text[], %(priorities)s::smallint[], %(keys)s::text[], %(policies)s::text[], %(flags)s::text[],
        %(good_until)s::timestamptz[], %(run_at)s::timestamptz[], %(delay_ms)s::text::bigint[], %(serials)s::text[],
        %(gates)s::text[], %(costs)s::text[], %(labels)s::text[]
    ) with ordinality as k (name, queue, priority, key, policy, flags, good_until, run_at, delay_ms, serial, gates, costs, labels, kind)
), asked as (
    select r.id, r.args, k.*
        -- [context
        , nullif(r.context::text, 'null')::json as context
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
-- [batch
), batch as materialized (
    select b.id, b.sealed_at is null as is_open from {schema}.batches b where b.id = %(batch_id)s for share
-- batch]
), inserted as (
    insert into {schema}.tasks (
        id, name, queue, priority, args, key, policy, flags, good_until, serial, sent_at, enqueued_at, serial_at, gates, costs, labels
        -- [batch
        , batch_id
        -- batch]
        -- [context
        , context
        -- context]
    )
    select
        id, name, queue, priority, args, key, policy::json, flags::json, good_until, serial, statement_timestamp(),
        greatest(statement_timestamp(), run_at, statement_timestamp() + delay),
        case when serial is not null then greatest(statement_timestamp(), run_at, statement_timestamp() + delay) end,
        gates::text[], costs::integer[], labels::jsonb
        -- [batch
        , %(batch_id)s
        -- batch]
        -- [context
        , context
        -- context]
    from asked
    -- [batch
    where exists (select from batch where is_open)
    -- batch]
    order by name, key, id
    on conflict do nothing
    returning id, queue
), hint as materialized (
    select count(pg_notify(%(channel)s, 't:' || left(queue, 1000))) filter (where (select pg_notification_queue_usage()) < 0.5) as hints from (select distinct queue from inserted) queues
    where %(joined)s
-- [batch
), noted as (
    insert into {schema}.batch_events (batch_id, number) select %(batch_id)s, count(*) from inserted having count(*) > 0
-- batch]
)
select null::uuid as id, null::uuid as asked, hints
    -- [batch
    , (select case when is_open then 'open' else 'sealed' end from batch) as batch
    -- batch]
from hint
union all
select
    coalesce(
        (select t.id from {schema}.tasks t where t.id = a.id),
        (select t.id from {schema}.tasks t where t.name = a.name and t.key = a.key and t.state in ('PENDING', 'CLAIMED', 'RUNNING')),
        (select i.id from inserted i join asked b on b.id = i.id where b.name = a.name and b.key = a.key)
    ),
    a.id,
    null
    -- [batch
    , null
    -- batch]
from asked a
left join inserted mine on mine.id = a.id
where mine.id is null
