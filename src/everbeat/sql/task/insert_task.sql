-- Sends one task: nothing -> PENDING. The id is the client's, so that it may be repeated. No row where the task is there already, or a
-- live one of the same name has its key: then task/sent tells which. One insert and nothing around it, since this is most of what a send costs.
-- Nobody is told while every worker is busy; in somebody's own transaction (`joined`) they are told all the same, since whoever begins
-- to rest before its commit has not been seen resting.
insert into {schema}.tasks (id, name, queue, priority, args, key, policy, flags, good_until, serial, sent_at, enqueued_at, serial_at)
values (
    %(id)s, %(name)s, %(queue)s, %(priority)s, %(args)s::text::json, %(key)s, %(policy)s::text::json, %(flags)s::text::json, %(good_until)s, %(serial)s,
    statement_timestamp(),
    greatest(statement_timestamp(), %(run_at)s::timestamptz, statement_timestamp() + %(delay_ms)s::bigint * interval '1 millisecond'),
    case when %(serial)s::text is not null
        then greatest(statement_timestamp(), %(run_at)s::timestamptz, statement_timestamp() + %(delay_ms)s::bigint * interval '1 millisecond') end
)
on conflict do nothing
returning id, case when (%(joined)s or exists (select from {schema}.workers w where w.listens and w.ended_at is null))
    and (select pg_notification_queue_usage()) < 0.5 then pg_notify(%(channel)s, 't:' || left(queue, 1000)) end
