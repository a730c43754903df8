-- Send a task as a tick of the schedule does: nothing -> PENDING. Paused, retired and ended schedules can run, too. The client's id makes the
-- call idempotent. `context` is the carrier of the send, if it is traced. With an overlap policy that buffers, the run joins the serial line of the schedule. Return no row if there is no such
-- schedule, and a null id if a live task had the key of the run and has just ended.
with chosen as materialized (
    select s.name, s.task, s.args, s.queue, s.priority, s.key, s.policy, s.flags, s.expires_ms, s.gates, s.costs, s.labels,
        coalesce(s.serial, case when s.overlap in ('buffer_one', 'buffer_all') then 'schedule:' || s.name end) as serial
    from {schema}.schedules s where s.name = %(name)s
), inserted as (
    insert into {schema}.tasks (id, name, queue, priority, args, key, policy, flags, good_until, serial, sent_at, enqueued_at, serial_at, schedule, gates, costs, labels, context)
    select
        %(id)s, c.task, c.queue, c.priority, c.args, c.key, c.policy, c.flags, statement_timestamp() + c.expires_ms * interval '1 millisecond',
        c.serial, statement_timestamp(), statement_timestamp(), case when c.serial is not null then statement_timestamp() end, c.name, c.gates, c.costs, c.labels,
        %(context)s::text::json
    from chosen c
    on conflict do nothing
    returning id, queue
)
select
    coalesce(
        (select i.id from inserted i),
        (select t.id from {schema}.tasks t where t.id = %(id)s),
        (select t.id from {schema}.tasks t where t.name = c.task and t.key = c.key and t.state in ('PENDING', 'CLAIMED', 'RUNNING'))
    ) as id,
    (
        select pg_notify(%(channel)s, 't:' || left(i.queue, 1000)) from inserted i
        where (select pg_notification_queue_usage()) < 0.5 and exists (select from {schema}.workers w where w.listens and w.ended_at is null)
    )
from chosen c
