-- Send one task, unless a limit of it that drops tasks is full: nothing -> PENDING. Such a limit is full if its permits in use, and the due
-- tasks that wait for them, reach its concurrency. Then return the task that holds the oldest permit, or the first waiting one. If there is
-- no such task, return no id, but the gate, its concurrency and the cost. The client generates the id, so the call is idempotent. Senders do
-- not lock each other out. If two of them find the same room, the surplus task is cancelled when it would have to wait. Return no row if a
-- live task with the same name has the key, as task/insert_task does. The part "context" stores a carrier, for senders that trace.
with place as materialized (
    select coalesce(
        %(serial)s::text,
        {schema}.line_of(
            %(queue)s::text, %(priority)s::smallint, %(name)s::text, %(gates)s::text::text[], %(costs)s::text::integer[],
            {schema}.mark_of(%(name)s::text, '{{"limits": true}}'), false
        )
    ) as line
), bounded as materialized (
    select u.gate, coalesce((%(costs)s::text::integer[])[u.place], 1) as cost, l.concurrency
    from unnest(%(gates)s::text::text[]) with ordinality as u (gate, place)
    join {schema}.limits l on l.name = split_part(u.gate, '/', 1)
    where l.when_full = 'drop' and l.concurrency is not null
), rival as materialized (
    select b.gate, t.id, t.name, t.claimed_at, t.serial_at, coalesce(t.costs[array_position(t.gates, b.gate)], 1) as cost
    from bounded b
    join {schema}.tasks t on t.state in ('CLAIMED', 'RUNNING') and t.gates @> array[b.gate]
    union all
    select b.gate, w.id, w.name, null, w.serial_at, w.cost
    from bounded b
    cross join lateral (
        (
            select t.id, t.name, t.serial_at, b.cost from place p join {schema}.tasks t on t.serial = p.line and t.state = 'PENDING'
            where t.gates @> array[b.gate] and t.serial_at <= statement_timestamp() and t.enqueued_at <= statement_timestamp()
            order by t.serial_at, t.id limit greatest(b.concurrency, 1)
        )
        union all
        (
            select t.id, t.name, t.serial_at, coalesce(t.costs[array_position(t.gates, b.gate)], 1)
            from {schema}.lines l
            cross join place p
            cross join lateral (
                select t.* from {schema}.tasks t
                where t.serial = l.line and t.state = 'PENDING' and t.serial_at <= statement_timestamp() and t.enqueued_at <= statement_timestamp()
                order by t.serial_at, t.id limit 1
            ) t
            where l.state = 'B' and l.blocked = b.gate and l.line <> p.line
            limit greatest(b.concurrency, 1)
        )
    ) w
), full_gate as materialized (
    select b.gate, b.concurrency, b.cost from bounded b
    where b.concurrency < b.cost + (select coalesce(sum(r.cost), 0) from rival r where r.gate = b.gate and r.id <> %(id)s)
), inserted as (
    insert into {schema}.tasks (
        id, name, queue, priority, args, key, policy, flags, good_until, serial, sent_at, enqueued_at, serial_at, gates, costs, labels
        -- [context
        , context
        -- context]
    )
    select
        %(id)s, %(name)s, %(queue)s, %(priority)s, %(args)s::text::json, %(key)s, %(policy)s::text::json, %(flags)s::text::json,
        %(good_until)s::timestamptz, %(serial)s::text, statement_timestamp(),
        greatest(statement_timestamp(), %(run_at)s::timestamptz, statement_timestamp() + %(delay_ms)s::bigint * interval '1 millisecond'),
        case when %(serial)s::text is not null
            then greatest(statement_timestamp(), %(run_at)s::timestamptz, statement_timestamp() + %(delay_ms)s::bigint * interval '1 millisecond') end,
        %(gates)s::text::text[], %(costs)s::text::integer[], %(labels)s::text::jsonb
        -- [context
        , %(context)s::text::json
        -- context]
    where not exists (select from full_gate)
    on conflict do nothing
    returning id, queue
)
select i.id, %(name)s::text as name, null as gate, null::integer as concurrency, null::integer as cost,
    case when %(joined)s and (select pg_notification_queue_usage()) < 0.5
        then pg_notify(%(channel)s, 't:' || left(i.queue, 1000)) end
from inserted i
union all
select t.id, t.name, null, null, null, null from {schema}.tasks t where t.id = %(id)s
union all
(
    select r.id, r.name, f.gate, f.concurrency, f.cost, null
    from full_gate f
    left join rival r on r.gate = f.gate
    where not exists (select from {schema}.tasks t where t.id = %(id)s)
    order by r.id is null, r.claimed_at nulls last, r.serial_at, r.id
    limit 1
)
limit 1
