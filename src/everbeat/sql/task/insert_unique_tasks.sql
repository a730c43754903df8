-- Send tasks, all or none: nothing -> PENDING. Their keys have a scope (`unique_for`; null: while the task is live), and each send has an
-- answer to duplicates (`on_duplicate`). Plain tasks can be among them. The client's ids make the call idempotent. A task that
-- this call, or an earlier try of it, changed has the call's id in `last_send`.
-- `taken`: the primary key of unique_keys decides between two sends. The trigger clear_key first deletes a free key, also one that became
-- free after this statement's snapshot. Keys are taken, and waiting tasks locked, in the order of name and key, so that two such statements
-- cannot deadlock. No key occurs twice in a call.
-- `rejected`: if a key of a "reject" is taken, nothing is stored. If another transaction takes that key in the meantime, the statement is
-- aborted by refuse_key and repeated. A statement with one task stores nothing anyway and needs no abort.
-- `changed`: "replace" and "debounce" change only a waiting task whose code has never started. A task that a worker claims at this moment
-- is no longer waiting after the lock. A replaced task keeps its place in the queue, unless the send has its own due time.
-- Return a row for each task that was not inserted, after one row for the notifications. A row without an id must be sent again: the
-- holder of its key has just changed. The part "context" stores carriers, for senders that trace.
with kinds as (
    select k.*, k.delay_ms * interval '1 millisecond' as delay
    from unnest(
        %(names)s::text[], %(queues)s::text[], %(priorities)s::smallint[], %(keys)s::text[], %(policies)s::text[], %(flags)s::text[],
        %(good_until)s::timestamptz[], %(run_at)s::timestamptz[], %(delay_ms)s::text::bigint[], %(serials)s::text[],
        %(unique_for)s::text[], %(on_duplicate)s::text[], %(at_latest_ms)s::text::bigint[], %(gates)s::text[], %(costs)s::text[],
        %(labels)s::text[]
    ) with ordinality as k (
        name, queue, priority, key, policy, flags, good_until, run_at, delay_ms, serial, unique_for, on_duplicate, at_latest_ms, gates,
        costs, labels, kind
    )
), asked as materialized (
    select r.id, r.args,
        -- [context
        nullif(r.context::text, 'null')::json as context,
        -- context]
        k.*, greatest(statement_timestamp(), k.run_at, statement_timestamp() + k.delay) as due_at,
        k.run_at is not null or k.delay_ms > 0 as has_moment
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
), before as materialized (
    select a.id as asked, t.id from asked a join {schema}.tasks t on t.id = a.id
    union all
    select a.id, t.id from asked a join {schema}.tasks t on t.last_send = a.id
), holder as materialized (
    select a.id as asked, a.name, a.key, a.on_duplicate, a.unique_for, coalesce(live.id, taken.task_id) as id
    from asked a
    left join lateral (
        select t.id from {schema}.tasks t
        where a.unique_for is null and t.name = a.name and t.key = a.key and t.state in ('PENDING', 'CLAIMED', 'RUNNING')
    ) live on true
    left join lateral (
        select u.task_id from {schema}.unique_keys u
        where a.unique_for is not null and u.name = a.name and u.key = a.key and (u.until is null or u.until > statement_timestamp())
    ) taken on true
    where a.key is not null and not exists (select from before b where b.asked = a.id)
), rejected as materialized (
    select h.id from holder h where h.on_duplicate = 'reject' and h.id is not null
), taken as (
    insert into {schema}.unique_keys (name, key, task_id)
    select h.name, h.key, h.asked from holder h
    where h.unique_for is not null and not exists (select from rejected)
    order by h.name, h.key
    on conflict do nothing
    returning task_id
), inserted as (
    insert into {schema}.tasks (
        id, name, queue, priority, args, key, policy, flags, good_until, serial, sent_at, enqueued_at, serial_at, unique_key, unique_for, gates,
        costs, labels
        -- [context
        , context
        -- context]
    )
    select
        a.id, a.name, a.queue, a.priority, a.args, case when a.unique_for is null then a.key end, a.policy::json, a.flags::json, a.good_until,
        a.serial, statement_timestamp(), a.due_at, case when a.serial is not null then a.due_at end,
        case when a.unique_for is not null then a.key end, a.unique_for, a.gates::text[], a.costs::integer[], a.labels::jsonb
        -- [context
        , a.context
        -- context]
    from asked a
    where (a.unique_for is null or exists (select from taken k where k.task_id = a.id))
      and not exists (select from before b where b.asked = a.id) and not exists (select from rejected)
    order by a.name, a.key, a.id
    on conflict do nothing
    returning id, queue
), waiting as materialized (
    select t.id, t.attempt, h.asked
    from holder h
    join {schema}.tasks t on t.id = h.id
    where h.on_duplicate in ('replace', 'debounce') and t.state = 'PENDING' and not exists (select from rejected)
      and not exists (select from inserted i where i.id = h.asked)
    order by h.name, h.key
    for no key update of t
), changed as (
    update {schema}.tasks t
    set enqueued_at = least(
            case when m.is_new and not a.has_moment then t.enqueued_at end, a.due_at, t.sent_at + a.at_latest_ms * interval '1 millisecond'
        ),
        serial_at = case when case when m.is_new then a.serial else t.serial end is not null then least(
            case when m.is_new and not a.has_moment then t.enqueued_at end, a.due_at, t.sent_at + a.at_latest_ms * interval '1 millisecond'
        ) end,
        args = case when m.is_new then a.args else t.args end, queue = case when m.is_new then a.queue else t.queue end,
        priority = case when m.is_new then a.priority else t.priority end, policy = case when m.is_new then a.policy::json else t.policy end,
        flags = case when m.is_new then a.flags::json else t.flags end, serial = case when m.is_new then a.serial else t.serial end,
        gates = case when m.is_new then a.gates::text[] else t.gates end, costs = case when m.is_new then a.costs::integer[] else t.costs end,
        needs = case when not m.is_new then t.needs end, needs_id = case when not m.is_new then t.needs_id end,
        unique_for = case when m.is_new then a.unique_for else t.unique_for end, good_until = a.good_until, last_send = a.id
        -- [context
        , context = case when m.is_new then a.context else t.context end
        -- context]
    from waiting w
    join asked a on a.id = w.asked
    cross join lateral (select a.on_duplicate = 'replace' as is_new) m
    where t.id = w.id and w.attempt = 0
    returning t.id, t.queue
), hint as materialized (
    select count(pg_notify(%(channel)s, 't:' || left(queue, 1000))) filter (where (select pg_notification_queue_usage()) < 0.5) as hints
    from (select queue from inserted union select queue from changed) queues
    where %(joined)s
)
select null::uuid as id, null::uuid as asked, hints from hint
union all
select
    coalesce(
        (select b.id from before b where b.asked = a.id order by b.id = a.id desc limit 1),
        (select w.id from waiting w where w.asked = a.id),
        (select h.id from holder h where h.asked = a.id and (h.on_duplicate in ('existing', 'reject') or h.unique_for is distinct from 'waiting'))
    ),
    a.id,
    case when a.on_duplicate = 'reject' and not exists (select from rejected) and not exists (select from before b where b.asked = a.id)
            and (select count(*) from asked) > 1
        then {schema}.refuse_key(a.name, a.key) end
from asked a
where not exists (select from inserted i where i.id = a.id)
