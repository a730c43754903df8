-- Send tasks for ticks of a schedule that were not sent: nothing -> PENDING. A tick that was sent before is left out, so the statement can be
-- repeated. So is a tick whose key a live task has. A row about a series of missed ticks keeps the rest of the series.
with held as materialized (
    select s.name, s.task, s.args, s.queue, s.priority, s.key, s.policy, s.flags, s.serial, s.gates, s.costs, s.labels
    from {schema}.schedules s where s.name = %(name)s for no key update
), tick as materialized (
    select k.*
    from held h
    cross join lateral json_to_recordset(%(ticks)s::text::json) as k ({fragment/tick_fields})
    where k.outcome = 'SENT' and (select o.outcome from {schema}.ticks o where o.schedule = h.name and o.at = k.at) is distinct from 'SENT'
), inserted as (
    insert into {schema}.tasks (
        id, name, queue, priority, args, key, policy, flags, good_until, serial, sent_at, enqueued_at, serial_at, schedule, tick, gates, costs, labels
    )
    select
        k.task_id, h.task, h.queue, h.priority, h.args, h.key, h.policy, h.flags, k.good_until, line.serial, statement_timestamp(),
        statement_timestamp(), case when line.serial is not null then statement_timestamp() end, h.name, k.at, h.gates, h.costs, h.labels
    from tick k
    cross join held h
    cross join lateral (select coalesce(h.serial, case when k.is_serial then 'schedule:' || h.name end) as serial) line
    order by h.task, h.key, k.at, k.task_id
    on conflict do nothing
    returning id, queue, tick
), stored as (
    insert into {schema}.ticks as o (schedule, at, outcome, task_id, detail, decided_by)
    select h.name, k.at, 'SENT', k.task_id, 'backfill', %(decided_by)s
    from tick k
    cross join held h
    where exists (select from inserted i where i.id = k.task_id) or (select t.id from {schema}.tasks t where t.id = k.task_id) is not null
    order by k.at
    on conflict (schedule, at) do update
    set outcome = 'SENT', task_id = excluded.task_id, reason = null, detail = excluded.detail, decided_at = statement_timestamp(),
        decided_by = excluded.decided_by, missed = o.missed - 1
    where o.outcome <> 'SENT'
    returning at
), hint as materialized (
    select count(pg_notify(%(channel)s, 't:' || left(i.queue, 1000))) filter (where (select pg_notification_queue_usage()) < 0.5) as hints
    from (select distinct queue from inserted) i
    where (select count(*) from inserted) >= 100 or exists (select from {schema}.workers w where w.listens and w.ended_at is null)
)
select (select count(*) from inserted) as sent, (select hints from hint) as hints from held
