-- Sends many tasks at once, all or none: nothing -> PENDING. Repeatable by the client's ids. Keys are taken in one order, so that
-- two such statements wait for each other in no circle.
with asked as (
    select * from unnest(
        %(ids)s::uuid[], %(names)s::text[], %(queues)s::text[], %(priorities)s::smallint[], %(args)b::text[], %(keys)s::text[],
        %(policies)s::text[], %(flags)s::text[], %(good_until)s::timestamptz[], %(run_at)s::timestamptz[], %(delay_ms)s::bigint[],
        %(serials)s::text[]
    ) as a (id, name, queue, priority, args, key, policy, flags, good_until, run_at, delay_ms, serial)
), inserted as (
    insert into {schema}.tasks (id, name, queue, priority, args, key, policy, flags, good_until, serial, sent_at, enqueued_at, serial_at)
    select
        id, name, queue, priority, args::json, key, policy::json, flags::json, good_until, serial, statement_timestamp(),
        greatest(statement_timestamp(), run_at, statement_timestamp() + delay_ms * interval '1 millisecond'),
        case when serial is not null then greatest(statement_timestamp(), run_at, statement_timestamp() + delay_ms * interval '1 millisecond') end
    from asked
    order by name, key, id
    on conflict do nothing
    returning id, queue
), hint as materialized (
    select count(pg_notify(%(channel)s, 't:' || queue)) as hints from (select distinct queue from inserted) queues
)
select
    coalesce(
        mine.id,
        (select t.id from {schema}.tasks t where t.id = a.id),
        (select t.id from {schema}.tasks t where t.name = a.name and t.key = a.key and t.state in ('PENDING', 'CLAIMED', 'RUNNING')),
        (select i.id from inserted i join asked b on b.id = i.id where b.name = a.name and b.key = a.key)
    ) as id,
    a.id as asked,
    (select hints from hint) as hints
from asked a
left join inserted mine on mine.id = a.id
