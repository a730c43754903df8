-- Let waiting tasks of one portion of a bulk action run now, or move them to another queue, or give them another priority. Tasks that another
-- session has locked are not returned. Otherwise, return each task with a null, or with the reason why it was skipped. Triggers move tasks of
-- lines to their new lines. `last_send` is named so that the trigger tasks_message_moved writes the message of a moved task again. A sleep
-- between two tries of a step ends, too. Tasks of a strict line keep their order.
with held as materialized (
    select t.* from {schema}.tasks t where t.id = any(%(ids)s::text::uuid[]) order by t.id for no key update skip locked
), judged as materialized (
    select
        t.id, case when t.state <> 'PENDING' then 'CHANGED' else {fragment/refusal_of_live} end as refusal,
        row_number() over (order by t.serial_at, t.id) as place
    from held t
), woken as (
    update {schema}.steps s
    set due_at = statement_timestamp()
    from held h
    join judged j on j.id = h.id and j.refusal is null
    where %(action)s = 'run_now' and s.task_id = h.id and s.kind = 'sleep' and s.due_at = h.wake_at and s.result is not null
), changed as (
    update {schema}.tasks t
    set enqueued_at = case when %(action)s = 'run_now' then statement_timestamp() else t.enqueued_at end,
        wake_at = case when %(action)s = 'run_now' and t.wake_at is not null then statement_timestamp() else t.wake_at end,
        next_retry_at = case when %(action)s = 'run_now' then least(t.next_retry_at, statement_timestamp()) else t.next_retry_at end,
        serial_at = case when %(action)s = 'run_now' and t.serial is not null then least(t.serial_at, statement_timestamp() + j.place * interval '1 microsecond') else t.serial_at end,
        queue = case when %(action)s = 'move' then %(to_queue)s::text else t.queue end,
        priority = case when %(action)s = 'reprioritise' then %(to_priority)s::smallint else t.priority end,
        last_send = t.last_send
    from judged j
    where t.id = j.id and j.refusal is null
    returning t.queue
), hint as materialized (
    select count(pg_notify(%(channel)s, 't:' || left(q.queue, 1000))) filter (where (select pg_notification_queue_usage()) < 0.5) as hints
    from (select distinct c.queue from changed c) q
)
select j.id, j.refusal, (select h.hints from hint h) as hints from judged j
