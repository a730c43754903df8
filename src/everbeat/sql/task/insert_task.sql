-- Send one task: nothing -> PENDING. The client generates the id, so the call is idempotent. Return no row if the task already exists, or
-- if a live task with the same name has its key; task/find_sent_task then returns the existing task. The statement is a single insert,
-- because the insert accounts for most of the cost of a send. The statement itself notifies only in the user's own transaction (`joined`).
-- Otherwise task/announce_hints follows the commit, so that sends do not commit one after another.
-- The part "context" stores a carrier, for senders that trace.
insert into {schema}.tasks (
    id, name, queue, priority, args, key, policy, flags, good_until, serial, sent_at, enqueued_at, serial_at, gates, costs, labels
    -- [context
    , context
    -- context]
)
values (
    %(id)s, %(name)s, %(queue)s, %(priority)s, %(args)s::text::json, %(key)s, %(policy)s::text::json, %(flags)s::text::json, %(good_until)s, %(serial)s,
    statement_timestamp(),
    greatest(statement_timestamp(), %(run_at)s::timestamptz, statement_timestamp() + %(delay_ms)s::bigint * interval '1 millisecond'),
    case when %(serial)s::text is not null
        then greatest(statement_timestamp(), %(run_at)s::timestamptz, statement_timestamp() + %(delay_ms)s::bigint * interval '1 millisecond') end,
    %(gates)s::text::text[], %(costs)s::text::integer[], %(labels)s::text::jsonb
    -- [context
    , %(context)s::text::json
    -- context]
)
on conflict do nothing
returning id, case when %(joined)s and (select pg_notification_queue_usage()) < 0.5 then pg_notify(%(channel)s, 't:' || left(queue, 1000)) end
