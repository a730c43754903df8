-- Why a bulk action cannot act on a live task `t`, or null. A durable sleep and a wait for an event end by their own rules; only a sleep
-- between two tries of a step can be ended early. Tasks in the line of a serial queue stay in that queue.
case
        when %(action)s = 'run_now' and t.waits_for is not null then 'WAITS'
        when %(action)s = 'run_now' and t.enqueued_at <= statement_timestamp() then 'DUE'
        when %(action)s = 'run_now' and t.wake_at is not null and not exists (
            select from {schema}.steps s where s.task_id = t.id and s.kind = 'sleep' and s.due_at = t.wake_at and s.result is not null
        ) then 'SLEEPS'
        when %(action)s = 'move' and starts_with(t.serial, 'queue:') then 'SERIAL_QUEUE'
        when %(action)s = 'move' and t.queue = %(to_queue)s::text then 'UNCHANGED'
        when %(action)s = 'reprioritise' and t.priority = %(to_priority)s::smallint then 'UNCHANGED'
    end
