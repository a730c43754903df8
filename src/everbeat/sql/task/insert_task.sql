-- Sends one task: nothing -> PENDING. The id is the client's, so a repeated call answers the same.
-- A live task with the same name and key is answered instead of a new one.
with inserted as (
    insert into {schema}.tasks (id, name, queue, priority, args, key, policy, flags, good_until, serial, sent_at, enqueued_at, serial_at)
    values (
        %(id)s, %(name)s, %(queue)s, %(priority)s, %(args)s::text::json, %(key)s, %(policy)s::text::json, %(flags)s::text::json, %(good_until)s, %(serial)s,
        statement_timestamp(),
        greatest(statement_timestamp(), %(run_at)s::timestamptz, statement_timestamp() + %(delay_ms)s::bigint * interval '1 millisecond'),
        case when %(serial)s::text is not null
            then greatest(statement_timestamp(), %(run_at)s::timestamptz, statement_timestamp() + %(delay_ms)s::bigint * interval '1 millisecond') end
    )
    on conflict do nothing
    returning id, queue
)
select i.id, true as inserted, pg_notify(%(channel)s, 't:' || i.queue) from inserted i
union all
select t.id, t.id = %(id)s, null from {schema}.tasks t
where t.id = %(id)s and not exists (select from inserted)
union all
select t.id, false, null from {schema}.tasks t
where %(key)s::text is not null and t.name = %(name)s and t.key = %(key)s and t.state in ('PENDING', 'CLAIMED', 'RUNNING')
  and not exists (select from inserted)
limit 1
